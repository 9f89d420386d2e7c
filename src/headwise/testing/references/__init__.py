"""The slow float64 twins of the operators: P written out entry by entry, from the definitions.

Nothing here imports from the rest of headwise: a twin that shares a helper with what it judges repeats its mistakes.
"""

from headwise.testing.references.exact import *  # noqa: F403
from headwise.testing.references.linear import *  # noqa: F403
from headwise.testing.references.relative import *  # noqa: F403
from headwise.testing.references.sparse import *  # noqa: F403

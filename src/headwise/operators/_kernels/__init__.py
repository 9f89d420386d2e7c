"""How operators are computed; nothing in this folder is public."""

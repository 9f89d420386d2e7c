"""Does a model keep its promises?  One file for each group of them; `audit_model` tries them all."""

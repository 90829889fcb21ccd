"""Why something was slow: what is kept when it happens, told as text, logged, and bounded by budgets."""

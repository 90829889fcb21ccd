"""Launches that tell when each kernel was over, and what each of them does."""

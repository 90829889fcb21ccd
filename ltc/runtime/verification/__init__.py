"""LTC_VERIFY: each kernel of a program judged while it is launched, the first wrong one named."""

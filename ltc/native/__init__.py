"""The part of ltc that is C++, where it was built: calls that run when they are made, without Python."""

"""The generator of attention: forward, backward, few queries (decode), and what they share."""

"""What training scripts import besides `ltc.core`; files are in `ltc.checkpointing`."""

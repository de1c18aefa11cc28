"""The weight table: which parameters a library takes, and how they are made from a checkpoint's tensors."""

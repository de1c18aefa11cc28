"""From a model definition and a checkpoint to a library and packed weights."""

"""From a picture's pixels to a tower's patches, one file a processor, named after `model_type`; and decoding."""

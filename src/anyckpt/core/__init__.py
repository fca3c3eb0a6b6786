"""Boxes, sources, tensors, checkpoints: what a checkpoint is, without any file format and without I/O."""

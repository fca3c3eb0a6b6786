"""numpy's own files: one array (.npy), or a zip of them (.npz)."""

"""Checkpoints: safetensors and JSON, one directory per step, loadable on any layout."""

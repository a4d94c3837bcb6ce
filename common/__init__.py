"""Process plumbing that every plane uses: options, logs, probes, and what a model's folder holds."""

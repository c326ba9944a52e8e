"""What the drivers share: documents, workloads, meetings of the clients, provenance."""

"""Engines that reuse prefixes through the store: each module here knows one engine.

Owns nothing and imports nothing, so that `import ptstore_mpi` never pulls an engine in: import
`ptstore_mpi.integrations.transformers` by name where its engine is installed.
"""

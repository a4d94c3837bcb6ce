"""Engines: implementations of `octavo.dataplane.engine.Engine`."""

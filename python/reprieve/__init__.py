"""Decode large language models through KV-cache exhaustion, with not one bit of anybody's output changed."""

"""QK-Clip: what it holds, and what it costs."""

"""Words that users define: what they must pass, and the command for them."""

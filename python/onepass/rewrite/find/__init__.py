"""What in a captured graph a line can say: chains of words, and words that models write out."""

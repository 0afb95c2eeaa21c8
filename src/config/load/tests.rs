//! Bad configurations and what is said about them, word by word.

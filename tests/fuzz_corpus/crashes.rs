//! Inputs that once made a reader panic, each by the name of what was wrong.

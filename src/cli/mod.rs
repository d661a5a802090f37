//! The command line, one file a verb. Errors become text and exit codes here and nowhere else.

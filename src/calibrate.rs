//! The accuracy of every guess of every head on given rows.

//! Promises to users: each module is one file beside this one, and one promise. Private truths are tested at the foot of their own file.
mod recipe;

mod data;

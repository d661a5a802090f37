//! Promises to users: each module is one file beside this one, and one promise. Private truths are tested at the foot of their own file.

mod acceptance;
mod backbone;
mod bad_input;
mod bench;
mod calibrate;
mod chat;
mod chat_command;
mod command_line;
mod data;
mod decoding;
mod distill;
mod embedded_default;
mod joint_training;
mod layering;
mod losses;
mod memory_plan;
mod paper_recipes;
mod peft;
mod quantization;
mod readme;
mod recipe;
mod small_run;
mod training_command;
mod training_run;
mod tree;

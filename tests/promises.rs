//! Promises to users: one per module, each module in its own file in this folder, which begins with the promise. Unit tests of private code
//! are at the end of its file.

// Decoding and measuring
mod acceptance;
mod bench;
mod bench_endpoint;
mod calibrate;
mod chat_command;
mod decoding;
mod embedded_default;
mod latency;
mod same_bits;
mod sequential_heads;
mod stop_strings;
mod trained_prompts;
mod tree;
mod tree_prediction;

// Serving, and data from servers
mod distill;
mod distill_endpoint;
mod distill_endpoint_faults;
mod serve;
mod served;

// Training
mod captured_states;
mod eagle;
mod eagle_reference;
mod fused;
mod hydra_reference;
mod init;
mod joint_training;
mod keep_best;
mod losses;
mod memory_plan;
mod memory_table;
mod packing;
mod paper_recipes;
mod recipe;
mod report;
mod training_command;
mod training_run;

// Several processes and devices
mod device_map;
mod launched_processes;
mod process_equality;
mod scaling_table;
mod several_processes;
mod thread_ranks;

// Data and conversations
mod big_data;
mod chat;
mod containers;
mod conversations;
mod data;
mod data_command;
mod data_formats;
mod hostile_templates;
mod long_texts;
mod real_chat_templates;
mod row_keys;

// Models, tokenizers and files of other programs
mod backbone;
mod checksums;
mod compatibility;
mod config_keys;
mod export;
mod families;
mod gguf;
mod hub;
mod peft;
mod published_configs;
mod quantization;
mod tokenizer_files;
mod tokenizer_model;
mod torch_backbone;
mod two_sources;

// Kernels for GPUs, in the emulator
mod batch_attention;
mod cuda_engine;
mod cuda_hydra;
mod cuda_kernels;
mod gpu_check;
mod launches;

// Bad input, faults and attacks
mod bad_input;
mod campaign;
mod fuzz_corpus;
mod hostile_input;
mod limits;
mod panicking_libraries;

// Programs and packages
mod command_line;
mod launcher;
mod scripts;
mod setup;
mod terminal;
mod wheel;

// Source and README
mod layering;
mod readme;

// Support of the tests: no promises
mod api_server;
mod program;
mod published;
mod small_run;

//! The names of the processor and of the GPUs, as the system reports them.

/// The names of the processor and of the GPUs, where the system reports them.
pub fn processors() -> Vec<String> {
    cpu_name().into_iter().chain(gpu_names()).collect()
}

/// The name of the processor; `None` outside Linux.
pub fn cpu_name() -> Option<String> {
    colon_field(&std::fs::read_to_string("/proc/cpuinfo").ok()?, "model name")
}

/// The names of the GPUs, from the driver's files; empty without a driver.
pub fn gpu_names() -> Vec<String> {
    let Ok(gpus) = std::fs::read_dir("/proc/driver/nvidia/gpus") else { return Vec::new() };
    let files = gpus.flatten().map(|gpu| gpu.path().join("information"));
    files.filter_map(|file| colon_field(&std::fs::read_to_string(file).ok()?, "Model")).collect()
}

/// The value of the first `name : value` line.
fn colon_field(text: &str, name: &str) -> Option<String> {
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.into_iter().find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}

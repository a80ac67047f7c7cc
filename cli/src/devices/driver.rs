//! Manners of graphics drivers.

/// Software Vulkan drivers complain on standard error, once for each time they are asked, where no folder for run-time
/// files is named. Any folder will do, and a process can be given one only at its start: so this one starts over.
pub(crate) fn give_a_runtime_folder() {
    #[cfg(target_os = "linux")]
    if std::env::var_os("XDG_RUNTIME_DIR").is_none()
        && let Ok(program) = std::env::current_exe()
    {
        use std::os::unix::process::CommandExt;
        // Returns only if it failed; then the complaint is all there is to suffer.
        let _ = std::process::Command::new(program)
            .args(std::env::args_os().skip(1))
            .env("XDG_RUNTIME_DIR", std::env::temp_dir())
            .exec();
    }
}

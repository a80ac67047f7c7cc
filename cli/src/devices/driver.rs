//! Work-arounds for drivers.

/// Without `XDG_RUNTIME_DIR`, software Vulkan drivers print a complaint each time they are asked.
/// Any folder will do, but the variable must be set before the process starts: so this process
/// starts itself again.
pub(crate) fn give_a_runtime_folder() {
    #[cfg(target_os = "linux")]
    if std::env::var_os("XDG_RUNTIME_DIR").is_none()
        && let Ok(program) = std::env::current_exe()
    {
        use std::os::unix::process::CommandExt;
        // Returns only on failure; then the drivers complain, which is harmless.
        let _ = std::process::Command::new(program)
            .args(std::env::args_os().skip(1))
            .env("XDG_RUNTIME_DIR", std::env::temp_dir())
            .exec();
    }
}

/// A driver that gives up makes wgpu panic on a thread of the library, which catches it: the panic
/// becomes the error of the device. Its text would only stand before that error.
pub(crate) fn leave_out_caught_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() != Some(kyklos::backend::wgpu::WAITING_THREAD) {
            print(panic);
        }
    }));
}

use kyklos::backend::cpu::CpuBackend;

fn main() {
    kyklos_backend_suite::run("cpu", || Ok(CpuBackend::new()))
}

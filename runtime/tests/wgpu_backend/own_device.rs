//! A device and buffers that the caller has made, and results as buffers.

use kyklos::backend::Device;
use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};
use kyklos::{Attention, Dtype, Mask, Session, Tensor};
use kyklos_transport::in_process_group;

pub(crate) const ALL: [(&str, fn()); 2] = [
    (
        "a_callers_device_and_buffers_give_the_right_result",
        a_callers_device_and_buffers_give_the_right_result,
    ),
    (
        "a_device_without_a_needed_limit_and_buffers_that_do_not_fit_are_refused",
        a_device_without_a_needed_limit_and_buffers_that_do_not_fit_are_refused,
    ),
];

const SHAPE: [usize; 4] = [1, 24, 2, 32];
const ELEMENTS: usize = 24 * 2 * 32;

fn adapter() -> wgpu::Adapter {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    // The loader unloads the drivers with the last instance.
    std::mem::forget(instance);
    adapters.into_iter().next().unwrap()
}

fn open(adapter: &wgpu::Adapter, limits: wgpu::Limits) -> (wgpu::Device, wgpu::Queue) {
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    pollster::block_on(adapter.request_device(&descriptor)).unwrap()
}

fn buffer(device: &wgpu::Device, queue: &wgpu::Queue, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    let descriptor = wgpu::BufferDescriptor {
        label: None,
        size,
        usage: usage | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    };
    let buffer = device.create_buffer(&descriptor);
    queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&values()));
    buffer
}

fn values() -> Vec<f32> {
    (0..ELEMENTS).map(|index| (index as f32 * 0.31).sin()).collect()
}

const USAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC);

fn a_callers_device_and_buffers_give_the_right_result() {
    let adapter = adapter();
    let (native, queue) = open(&adapter, wgpu::Limits::default());
    let device = Device::from_wgpu(&native, &queue).unwrap();
    let mine = buffer(&native, &queue, ELEMENTS as u64 * 4, USAGE);
    let tensor = Tensor::from_wgpu(SHAPE, Dtype::F32, &device, mine).unwrap();
    let run = |device: &Device, x: &Tensor| {
        let mut session = Session::new(in_process_group(1).remove(0), device.clone());
        session.attend(&Attention::new().mask(Mask::causal()), x, x, x).unwrap().o
    };
    let output = run(&device, &tensor);
    assert_eq!(output.device().map(|on| on.is_same(&device)), Some(true));

    // The output as a buffer, read by the caller's own commands.
    let raw = output.wgpu_buffer().unwrap();
    let read = native.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: ELEMENTS as u64 * 4,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = native.create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(&raw, 0, &read, 0, ELEMENTS as u64 * 4);
    queue.submit(Some(encoder.finish()));
    read.map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
    native.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let read: Vec<f32> = bytemuck::pod_collect_to_vec(&read.get_mapped_range(..).unwrap());
    assert_eq!(read, output.to_vec::<f32>().unwrap());

    let own = Device::new(pollster::block_on(WgpuBackend::open(&adapter, &WgpuOptions::default())).unwrap());
    let uploaded = Tensor::new(SHAPE, values()).unwrap();
    let right = run(&own, &uploaded).to_vec::<f32>().unwrap();
    let error = read.iter().zip(&right).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    assert!(error < 2e-6, "{error}: the kernels may differ, the result may not");
}

fn a_device_without_a_needed_limit_and_buffers_that_do_not_fit_are_refused() {
    let adapter = adapter();
    let few = wgpu::Limits { max_storage_buffers_per_shader_stage: 4, ..wgpu::Limits::default() };
    let (native, queue) = open(&adapter, few);
    let error = Device::from_wgpu(&native, &queue).unwrap_err();
    assert!(
        error.is_request() && error.to_string().contains("max_storage_buffers_per_shader_stage = 4"),
        "{error}"
    );

    let (native, queue) = open(&adapter, wgpu::Limits::default());
    let device = Device::from_wgpu(&native, &queue).unwrap();
    let bytes = ELEMENTS as u64 * 4;
    let short = [1, 25, 2, 32];
    for (shape, size, usage, words) in [
        (short, bytes, USAGE, "6144 bytes for a tensor of 6400"),
        (SHAPE, bytes, wgpu::BufferUsages::STORAGE, "with the usages"),
        (SHAPE, bytes + 4, USAGE, "a buffer of 6148 bytes"),
    ] {
        let buffer = buffer(&native, &queue, size, usage);
        let error = Tensor::from_wgpu(shape, Dtype::F32, &device, buffer).unwrap_err();
        assert!(error.is_request() && error.to_string().contains(words), "{error}");
    }
    let mine = buffer(&native, &queue, bytes, USAGE);
    let error = Tensor::from_wgpu(SHAPE, Dtype::F32, &Device::cpu(), mine).unwrap_err();
    assert!(error.to_string().contains("a wgpu buffer for"), "{error}");
}

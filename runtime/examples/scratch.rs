use pollster::block_on;
fn main() {
    let inst = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let ad = block_on(inst.enumerate_adapters(wgpu::Backends::PRIMARY)).remove(0);
    println!(
        "{:?} tex2d {} ubo {} feats int64 {} imm {}",
        ad.get_info().name,
        ad.limits().max_texture_dimension_2d,
        ad.limits().max_uniform_buffer_binding_size,
        ad.features().contains(wgpu::Features::SHADER_INT64),
        ad.features().contains(wgpu::Features::IMMEDIATES)
    );
    let (dev, q) = block_on(ad.request_device(&wgpu::DeviceDescriptor {
        required_features: wgpu::Features::SUBGROUP
            | wgpu::Features::SHADER_INT64
            | wgpu::Features::IMMEDIATES,
        required_limits: ad.limits(),
        ..Default::default()
    }))
    .unwrap();
    let n_groups = 256u32;
    let iters = 1024u32;
    let buf = dev.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 1 << 22,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let ubo = dev.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 65536,
        usage: wgpu::BufferUsages::UNIFORM,
        mapped_at_creation: false,
    });
    let out = dev.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 1 << 20,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let tex = dev.create_texture(&wgpu::TextureDescriptor {
        label: None,
        size: wgpu::Extent3d { width: 4096, height: 64, depth_or_array_layers: 1 },
        mip_level_count: 1,
        sample_count: 1,
        dimension: wgpu::TextureDimension::D2,
        format: wgpu::TextureFormat::Rgba32Uint,
        usage: wgpu::TextureUsages::TEXTURE_BINDING
            | wgpu::TextureUsages::COPY_DST
            | wgpu::TextureUsages::STORAGE_BINDING,
        view_formats: &[],
    });
    let view = tex.create_view(&Default::default());
    let mut e = dev.create_command_encoder(&Default::default());
    e.copy_buffer_to_texture(
        wgpu::TexelCopyBufferInfo {
            buffer: &buf,
            layout: wgpu::TexelCopyBufferLayout {
                offset: 0,
                bytes_per_row: Some(65536),
                rows_per_image: None,
            },
        },
        tex.as_image_copy(),
        wgpu::Extent3d { width: 4096, height: 64, depth_or_array_layers: 1 },
    );
    q.submit([e.finish()]);
    for file in std::env::args().skip(1) {
        let src = std::fs::read_to_string(&file).unwrap();
        let m = dev.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(src.clone().into()),
        });
        let p = dev.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &m,
            entry_point: None,
            compilation_options: Default::default(),
            cache: None,
        });
        let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: out.as_entire_binding() }];
        if src.contains("binding(1)") {
            entries.push(wgpu::BindGroupEntry { binding: 1, resource: buf.as_entire_binding() });
        }
        if src.contains("binding(2)") {
            entries.push(wgpu::BindGroupEntry {
                binding: 2,
                resource: wgpu::BindingResource::TextureView(&view),
            });
        }
        if src.contains("binding(3)") {
            entries.push(wgpu::BindGroupEntry { binding: 3, resource: ubo.as_entire_binding() });
        }
        let bg = dev.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &p.get_bind_group_layout(0),
            entries: &entries,
        });
        let mut best = f64::MAX;
        for _ in 0..6 {
            let mut e = dev.create_command_encoder(&Default::default());
            {
                let mut c = e.begin_compute_pass(&Default::default());
                c.set_pipeline(&p);
                c.set_bind_group(0, &bg, &[]);
                c.dispatch_workgroups(n_groups, 1, 1);
            }
            let t = cpu();
            q.submit([e.finish()]);
            dev.poll(wgpu::PollType::wait_indefinitely()).unwrap();
            best = best.min(cpu() - t);
        }
        println!("{file}: {:.1} ns cpu per iteration", best * 1e9 / f64::from(n_groups * iters));
    }
}
fn cpu() -> f64 {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|t| {
            std::fs::read_to_string(t.ok()?.path().join("schedstat"))
                .ok()?
                .split(' ')
                .next()?
                .parse::<f64>()
                .ok()
        })
        .sum::<f64>()
        / 1e9
}

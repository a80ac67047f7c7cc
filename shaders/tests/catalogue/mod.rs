//! Every kernel in every variant that is checked, and how naga reads them. The tests and the
//! example that writes the kernels for other compilers share this list.

use kyklos_shaders::{
    AttendKernel, AttendVariant, BackwardKernel, BackwardVariant, BiasInput, DecodeKernel, DecodeVariant,
    Dialect, Kernel, MAX_HEAD_DIM, Matrices, Scales, Storage, Sums, Vendor,
};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

const HEAD_DIMS: [u32; 11] = [8, 32, 64, 72, 80, 96, 128, 192, 256, 264, MAX_HEAD_DIM];

/// Those of software Vulkan, Apple, NVIDIA and AMD, and of tests on software Vulkan.
const MATRICES: [Matrices; 6] = [
    Matrices { size: 8, subgroup_size: 8, halves: false, subgroups: 1 },
    Matrices { size: 8, subgroup_size: 32, halves: false, subgroups: 8 },
    Matrices { size: 16, subgroup_size: 32, halves: false, subgroups: 8 },
    Matrices { size: 16, subgroup_size: 64, halves: true, subgroups: 4 },
    Matrices { size: 8, subgroup_size: 16, halves: true, subgroups: 2 },
    Matrices { size: 8, subgroup_size: 8, halves: false, subgroups: 4 },
];

/// Softcap, and the tensor that is read for each pair. The kind of tensor alternates with the head
/// dim; the code that reads the tensor does not depend on the head dim.
fn options(head_dim: u32) -> [(bool, BiasInput); 3] {
    let bias = if head_dim.is_multiple_of(64) { BiasInput::Bias } else { BiasInput::Visible };
    [(false, BiasInput::None), (true, BiasInput::None), (false, bias)]
}

pub(crate) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![Kernel::Repack { words: 1 }, Kernel::Repack { words: 4 }, Kernel::ResetState];
    kernels.extend([1, 4].map(|words| Kernel::Accumulate { words }));
    for short in [Storage::F16, Storage::Bf16] {
        kernels.push(Kernel::Convert { from: Storage::F32, into: short, reports: false });
        kernels.push(Kernel::Convert { from: short, into: Storage::F32, reports: false });
    }
    kernels.push(Kernel::Convert { from: Storage::F32, into: Storage::F16, reports: true });
    for scales in Scales::ALL {
        kernels.extend(Storage::ALL.map(|storage| Kernel::ToCodes { storage, scales }));
        kernels.extend(Storage::ALL.map(|storage| Kernel::FromCodes { storage, scales }));
    }
    for head_dim in HEAD_DIMS {
        kernels.push(Kernel::Merge { head_dim });
        kernels.push(Kernel::MergeParts { head_dim });
        // Variants that a tuner may choose instead of the built-in ones: the number of rows and the storage
        // type are different places in the text.
        let attend = |variant, storage| {
            Kernel::Attend(AttendKernel { variant, storage, head_dim, softcap: false, bias: BiasInput::None })
        };
        // Units of 4 elements and of 8 are different texts.
        for storage in [Storage::F32, Storage::F16] {
            let built_in = AttendVariant::portable(Vendor::Other, head_dim, false);
            let others = [false, true]
                .into_iter()
                .flat_map(AttendVariant::portable_choices)
                .filter(|choice| *choice != built_in);
            kernels.extend(others.map(|variant| attend(variant, storage)));
        }
        for vendor in [Vendor::Software, Vendor::Nvidia] {
            let (variant, storage) = (BackwardVariant::Portable(vendor), Storage::F32);
            let (softcap, bias) = (false, BiasInput::None);
            let of_keys = variant.of_keys(head_dim, bias);
            kernels.extend([Sums::Queries].iter().chain(of_keys).map(|sums| {
                let sums = *sums;
                Kernel::AttendBackward(BackwardKernel { variant, sums, storage, head_dim, softcap, bias })
            }));
        }
        for size in AttendVariant::SUBGROUP_SIZES {
            let built_in = AttendVariant::subgroup_broadcast(size, head_dim);
            let others = AttendVariant::subgroup_broadcast_choices(size, head_dim);
            let others = others.filter(|choice| *choice != built_in);
            kernels.extend(others.map(|variant| attend(variant, Storage::F32)));
        }
        for storage in Storage::ALL {
            for sinks in [false, true] {
                kernels.push(Kernel::Finalize { storage, head_dim, sinks });
            }
            kernels.extend([false, true].map(|d_lse| Kernel::RowStats { storage, head_dim, d_lse }));
            let mut backward = vec![BackwardVariant::Portable(Vendor::Other)];
            let sizes = AttendVariant::SUBGROUP_SIZES;
            backward.extend(sizes.map(|size| BackwardVariant::lanes(size, head_dim)));
            backward.extend(
                MATRICES
                    .into_iter()
                    .filter_map(|matrices| BackwardVariant::cooperative(matrices, storage, head_dim)),
            );
            backward.dedup();
            for variant in backward {
                let matrices = matches!(variant, BackwardVariant::Cooperative(_));
                for (softcap, bias) in
                    options(head_dim).into_iter().filter(|(_, bias)| !(matrices && bias.any()))
                {
                    let of_keys = variant.of_keys(head_dim, bias);
                    let of_bias: &[Sums] = match bias {
                        BiasInput::Bias => &[Sums::Bias, Sums::SharedBias],
                        _ => &[],
                    };
                    kernels.extend([Sums::Queries].iter().chain(of_keys).chain(of_bias).map(|sums| {
                        Kernel::AttendBackward(BackwardKernel {
                            variant,
                            sums: *sums,
                            storage,
                            head_dim,
                            softcap,
                            bias,
                        })
                    }));
                }
            }
            let built_in = AttendVariant::SUBGROUP_SIZES
                .map(|size| AttendVariant::subgroup_broadcast(size, head_dim))
                .into_iter()
                .chain([AttendVariant::portable(Vendor::Other, head_dim, false)])
                .chain(
                    MATRICES
                        .into_iter()
                        .filter_map(|matrices| AttendVariant::cooperative(matrices, storage, head_dim)),
                );
            for variant in built_in {
                let matrices = matches!(variant, AttendVariant::Cooperative(_));
                for (softcap, bias) in
                    options(head_dim).into_iter().filter(|(_, bias)| !(matrices && bias.any()))
                {
                    kernels.push(Kernel::Attend(AttendKernel { variant, storage, head_dim, softcap, bias }));
                }
            }
            let lanes =
                AttendVariant::SUBGROUP_SIZES.map(|subgroup_size| DecodeVariant::Lanes { subgroup_size });
            for variant in [DecodeVariant::Portable].into_iter().chain(lanes) {
                let most = variant.most_slots(head_dim);
                if most == 0 {
                    continue;
                }
                let slots = [1, most.min(3), most];
                for (slots, (softcap, bias)) in slots.into_iter().zip(options(head_dim)) {
                    let kernel = DecodeKernel { variant, storage, head_dim, slots, softcap, bias };
                    kernels.push(Kernel::Decode(kernel));
                }
            }
        }
    }
    kernels
}

pub(crate) fn parsed(kernel: &Kernel) -> naga::Module {
    let source = kernel.source(Dialect::Naga);
    naga::front::wgsl::parse_str(&source)
        .unwrap_or_else(|error| panic!("{}: {}\n{source}", kernel.name(), error.emit_to_string(&source)))
}

pub(crate) fn validated(kernel: &Kernel, module: &naga::Module) -> ModuleInfo {
    // WebGPU without features (reading packed f16 as f32 is part of it), and subgroups for kernels that
    // need them.
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    if kernel.needs_subgroups() {
        capabilities |= Capabilities::SUBGROUP;
    }
    if kernel.needs_matrices() {
        capabilities |= Capabilities::COOPERATIVE_MATRIX | Capabilities::SHADER_FLOAT16;
    }
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    if kernel.needs_subgroups() {
        validator
            .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
            .subgroup_operations(naga::valid::SubgroupOperationSet::all());
    }
    validator.validate(module).unwrap_or_else(|error| panic!("{}: {error:?}", kernel.name()))
}

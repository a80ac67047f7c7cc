//! The kernels, their arguments, and which one a call gets. Data and pure functions; no device.

mod all;
mod arguments;
mod backward;
mod catalog;
mod codes;
mod decode;
mod device_work;
mod hopper;
mod kernel_choice;
mod sources;

pub(crate) use all::all_kernels;
pub use arguments::{
    AttendArguments, BackwardArguments, ClearArguments, CodesArguments, ConvertArguments, DecodeArguments,
    HeadPack, PartsArguments, RepackArguments, RowStatsArguments, StateArguments, TensorArgument, logits,
};
pub use backward::{
    BACKWARD_TILE, BackwardKernel, BackwardList, BackwardSums, head_readers, row_stats_kernel,
};
pub use catalog::{AttendKernel, PACKED_ROWS, SMALL_THREADS, STATE_ROWS, convert_kernel, finalize_kernel};
pub use codes::{CodesKernel, Direction};
pub use decode::{decode_parts, head_packs};
pub use device_work::DeviceWork;
pub use hopper::{HopperArguments, HopperBackwardArguments, TensorMap, item_of_round};
pub use kernel_choice::{BackwardShape, CallShape, KernelChoice};
pub use sources::SOURCES;

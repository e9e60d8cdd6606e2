//! Devices that are on sale, as their vendors describe them: peak rates without sparsity, bandwidths, memory.
//!
//! Numbers are the vendors' own, of the documents named at each; a vendor's "GB" is taken as 10^9 bytes. The table was
//! made on 2026-11-21 and compared that day with public copies of the documents; those of the nodes' network cards were not.
//! What a program reaches of a peak is in none of them: [`Efficiency`] is assumed.

use crate::error::AnalyticError;
use crate::measured::Measured;

/// Who makes a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA: NCCL.
    Nvidia,
    /// AMD: RCCL.
    Amd,
}

/// What a program reaches of a peak, in thousandths: assumed, not measured on the machine at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Efficiency {
    /// Of the peak rate in large matrix products.
    pub matmul_permille: u64,
    /// Of the peak rate in the forward of attention (FlashAttention-2, which PyTorch ships), counted over what a causal
    /// mask leaves.
    pub attention_forward_permille: u64,
    /// The same of its backward.
    pub attention_backward_permille: u64,
    /// Of the memory's bandwidth in steps that work on each value alone.
    pub memory_permille: u64,
    /// Of the links' bandwidth in collectives on large messages.
    pub network_permille: u64,
}

/// Where the efficiencies come from, for people.
pub const EFFICIENCY: &str = "A100, H100, H200 in 16 bit: products, attention forward and collectives in a node by size, as \
     ai-dynamo/aiconfigurator (commit 095f58a51c4c, Apache-2.0) measured them on A100 and H100; backward assumed: products as \
     the forward's of the same sizes, attention 83 % of the forward's rate; other devices and float32 assumed: matrix products A100 80 %, \
     H100 and H200 70 %, MI300X 47 % (SemiAnalysis, 2024-12), others 70 % without a source; attention A100 60 / 50 %, H100 \
     and H200 36 / 30 % (FlashAttention-2 and -3, arXiv 2307.08691 and 2407.08608), others without a source; memory 80 to 85 % \
     and links between nodes 80 % without a source";

/// One device, and the node it stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hardware {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// Its vendor.
    pub vendor: Vendor,
    /// Peak rate of bfloat16 and float16 products with float32 sums, dense, in 10^9 operations a second.
    pub half_gflops: u64,
    /// Peak rate of float32 products without TF32 (PyTorch's default), likewise.
    pub float32_gflops: u64,
    /// Peak rate with TF32, dense, likewise; shown, not used.
    pub tf32_gflops: u64,
    /// Bandwidth of the memory, in bytes a second.
    pub memory_bytes_per_s: u64,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Bandwidth of all links of a device to others of its node, one direction, in bytes a second.
    pub node_bytes_per_s: u64,
    /// Bandwidth between two devices of a node, one direction, in bytes a second.
    pub pair_bytes_per_s: u64,
    /// Bandwidth of a device's share of the node's network cards, one direction, in bytes a second: of the system named.
    pub cluster_bytes_per_s: u64,
    /// Where device and links are described.
    pub source: &'static str,
    /// The system that `cluster_bytes_per_s` is of, or that it is assumed.
    pub system: &'static str,
    /// The chip whose kernels were measured ([`Measured::of_chip`]): efficiencies of products and attention in 16 bit, and
    /// of collectives in a node, then come from there. `None`: they are assumed.
    pub chip: Option<&'static str>,
    /// What a program reaches; of products and attention only where nothing was measured.
    pub efficiency: Efficiency,
}

const GB: u64 = 1_000_000_000;

const A100_EFFICIENCY: Efficiency = Efficiency {
    matmul_permille: 800,
    attention_forward_permille: 600,
    attention_backward_permille: 500,
    memory_permille: 850,
    network_permille: 800,
};
const HOPPER_EFFICIENCY: Efficiency = Efficiency {
    matmul_permille: 700,
    attention_forward_permille: 360,
    attention_backward_permille: 300,
    memory_permille: 850,
    network_permille: 800,
};
/// No source: between the two generations of data center devices.
const ADA_EFFICIENCY: Efficiency = Efficiency {
    matmul_permille: 700,
    attention_forward_permille: 550,
    attention_backward_permille: 450,
    memory_permille: 850,
    network_permille: 800,
};

const A100_40: Hardware = Hardware {
    name: "a100-40gb",
    title: "NVIDIA A100 SXM 40 GB",
    vendor: Vendor::Nvidia,
    half_gflops: 312_000,
    float32_gflops: 19_500,
    tf32_gflops: 156_000,
    memory_bytes_per_s: 1_555 * GB,
    memory_bytes: 40 * GB,
    // NVLink 3: 600 GB/s, both directions together.
    node_bytes_per_s: 300 * GB,
    pair_bytes_per_s: 300 * GB,
    // Eight cards of 200 Gb/s for eight devices.
    cluster_bytes_per_s: 25 * GB,
    source: "NVIDIA A100 Tensor Core GPU datasheet, 2022, https://www.nvidia.com/en-us/data-center/a100/",
    system: "NVIDIA DGX A100: 8 x 200 Gb/s, https://www.nvidia.com/en-us/data-center/dgx-a100/",
    chip: Some("a100"),
    efficiency: A100_EFFICIENCY,
};

const H100: Hardware = Hardware {
    name: "h100",
    title: "NVIDIA H100 SXM 80 GB",
    vendor: Vendor::Nvidia,
    // The datasheet's 1,979 are with sparsity; so are TF32's 989.
    half_gflops: 989_400,
    float32_gflops: 67_000,
    tf32_gflops: 494_700,
    memory_bytes_per_s: 3_350 * GB,
    memory_bytes: 80 * GB,
    // NVLink 4: 900 GB/s, both directions together.
    node_bytes_per_s: 450 * GB,
    pair_bytes_per_s: 450 * GB,
    // Eight cards of 400 Gb/s for eight devices.
    cluster_bytes_per_s: 50 * GB,
    source: "NVIDIA H100 Tensor Core GPU datasheet, 2023, https://www.nvidia.com/en-us/data-center/h100/; dense rates: \
             NVIDIA H100 Tensor Core GPU Architecture, V1.04",
    system: "NVIDIA DGX H100: 8 x 400 Gb/s, https://www.nvidia.com/en-us/data-center/dgx-h100/",
    chip: Some("h100"),
    efficiency: HOPPER_EFFICIENCY,
};

/// The table.
pub const HARDWARE: [Hardware; 8] = [
    A100_40,
    Hardware {
        name: "a100-80gb",
        title: "NVIDIA A100 SXM 80 GB",
        memory_bytes_per_s: 2_039 * GB,
        memory_bytes: 80 * GB,
        ..A100_40
    },
    H100,
    Hardware {
        name: "h200",
        title: "NVIDIA H200 SXM 141 GB",
        memory_bytes_per_s: 4_800 * GB,
        memory_bytes: 141 * GB,
        source: "NVIDIA H200 Tensor Core GPU datasheet, 2024, https://www.nvidia.com/en-us/data-center/h200/; the chip is \
                 that of the H100",
        system: "NVIDIA DGX H200: 8 x 400 Gb/s, https://www.nvidia.com/en-us/data-center/dgx-h200/",
        ..H100
    },
    Hardware {
        name: "b200",
        title: "NVIDIA B200 SXM 180 GB",
        // HGX B200, eight devices, with sparsity: 36 PFLOP/s of FP16, 18 of TF32; half of an eighth. FP32: 600 TFLOP/s.
        // NVIDIA's earlier architecture brief has 1,100 for TF32 and 80 for FP32.
        half_gflops: 2_250_000,
        float32_gflops: 75_000,
        tf32_gflops: 1_125_000,
        memory_bytes_per_s: 8_000 * GB,
        memory_bytes: 180 * GB,
        // NVLink 5: 1.8 TB/s, both directions together.
        node_bytes_per_s: 900 * GB,
        pair_bytes_per_s: 900 * GB,
        source: "NVIDIA DGX B200 datasheet, 2024, https://www.nvidia.com/en-us/data-center/dgx-b200/, and HGX platform \
                 table, https://www.nvidia.com/en-us/data-center/hgx/; memory bandwidth is a rounded eighth of 64 TB/s",
        system: "NVIDIA DGX B200: 8 x 400 Gb/s",
        // No source: FlashAttention-2 does not know the device's tensor cores.
        chip: None,
        efficiency: Efficiency {
            attention_forward_permille: 250,
            attention_backward_permille: 200,
            ..HOPPER_EFFICIENCY
        },
        ..H100
    },
    Hardware {
        name: "l40s",
        title: "NVIDIA L40S 48 GB",
        vendor: Vendor::Nvidia,
        half_gflops: 362_050,
        float32_gflops: 91_600,
        tf32_gflops: 183_000,
        memory_bytes_per_s: 864 * GB,
        memory_bytes: 48 * GB,
        // PCIe 4 x16: 64 GB/s, both directions together; no NVLink.
        node_bytes_per_s: 32 * GB,
        pair_bytes_per_s: 32 * GB,
        cluster_bytes_per_s: 25 * GB,
        source: "NVIDIA L40S datasheet, 2023, https://www.nvidia.com/en-us/data-center/l40s/",
        system: "assumed: 200 Gb/s a device",
        chip: None,
        efficiency: ADA_EFFICIENCY,
    },
    Hardware {
        name: "rtx-4090",
        title: "NVIDIA GeForce RTX 4090 24 GB",
        vendor: Vendor::Nvidia,
        // With float32 sums; with float16 sums it would be twice that.
        half_gflops: 165_200,
        float32_gflops: 82_600,
        tf32_gflops: 82_600,
        memory_bytes_per_s: 1_008 * GB,
        memory_bytes: 24 * GB,
        // PCIe 4 x16, through the host: the device has no direct way to another.
        node_bytes_per_s: 32 * GB,
        pair_bytes_per_s: 32 * GB,
        cluster_bytes_per_s: 3 * GB,
        source: "NVIDIA Ada GPU Architecture, V2.1, 2023, appendix A, \
                 https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        system: "assumed: one card of 100 Gb/s for four devices",
        chip: None,
        efficiency: ADA_EFFICIENCY,
    },
    Hardware {
        name: "mi300x",
        title: "AMD Instinct MI300X 192 GB",
        vendor: Vendor::Amd,
        half_gflops: 1_307_400,
        float32_gflops: 163_400,
        tf32_gflops: 653_700,
        memory_bytes_per_s: 5_300 * GB,
        memory_bytes: 192 * GB,
        // Seven links of 128 GB/s, both directions together, one to each other device of the node.
        node_bytes_per_s: 448 * GB,
        pair_bytes_per_s: 64 * GB,
        cluster_bytes_per_s: 50 * GB,
        source: "AMD Instinct MI300X data sheet, 2023, https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        system: "assumed: 400 Gb/s a device, as the reference design has it",
        // Attention: no source.
        chip: None,
        efficiency: Efficiency {
            matmul_permille: 470,
            attention_forward_permille: 250,
            attention_backward_permille: 200,
            memory_permille: 800,
            network_permille: 800,
        },
    },
];

impl Hardware {
    /// The device of that name; `a100` is that of 80 GB.
    ///
    /// # Errors
    /// [`AnalyticError::UnknownHardware`].
    pub fn named(name: &str) -> Result<&'static Self, AnalyticError> {
        let wanted = match name.to_ascii_lowercase().as_str() {
            "a100" => "a100-80gb".to_owned(),
            "h100-sxm" => "h100".to_owned(),
            "rtx4090" | "4090" => "rtx-4090".to_owned(),
            other => other.to_owned(),
        };
        HARDWARE.iter().find(|hardware| hardware.name == wanted).ok_or_else(|| {
            AnalyticError::UnknownHardware {
                name: name.to_owned(),
                known: HARDWARE.map(|hardware| hardware.name).join(", "),
            }
        })
    }

    /// The device that a driver calls by that name, for example `NVIDIA H100 80GB HBM3`; `None` where the table lacks it. A variant
    /// with other peak rates (`PCIe`, NVL, GH200) is another device.
    pub fn of_device(name: &str) -> Option<&'static Self> {
        const NAMES: [(&str, &str); 8] = [
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("AMD Instinct MI300X", "mi300x"),
        ];
        let (_, own) = NAMES.iter().find(|(device, _)| *device == name)?;
        HARDWARE.iter().find(|hardware| hardware.name == *own)
    }

    /// What was measured of its kernels at this dtype; `None` where efficiencies are assumed.
    pub fn measured(&self, dtype: &str) -> Option<&'static Measured> {
        if dtype == "float32" { None } else { self.chip.and_then(Measured::of_chip) }
    }

    /// Peak rate in products of this dtype, in 10^9 operations a second, and bytes of a value.
    ///
    /// # Errors
    /// [`AnalyticError::Dtype`].
    pub fn rate(&self, dtype: &str) -> Result<(u64, u64), AnalyticError> {
        match dtype {
            "bfloat16" | "float16" => Ok((self.half_gflops, 2)),
            "float32" => Ok((self.float32_gflops, 4)),
            _ => Err(AnalyticError::Dtype { dtype: dtype.to_owned() }),
        }
    }
}

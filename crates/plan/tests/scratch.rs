
mod fixture;
use dflop_cost::CostModel;
use dflop_plan::*;
use dflop_types::*;
#[test]
fn scratch() {
    for (n,m,e,pp,dp) in [(64usize,16u32,1u32,1u32,1u32),(64,8,1,1,1),(64,16,1,2,1),(64,8,2,1,2),(32,4,1,1,1),(256,16,4,2,4)] {
        let (mut a, mut b, mut lb) = (0u64, 0u64, 0u64);
        let t = std::time::Instant::now();
        for seed in 0..8 {
            let shapes = fixture::shapes(n, 1000+seed);
            let st = StepSettings{layout: Layout{encoder: ComponentLayout{tp:1,pp:1,dp:e}, llm: ComponentLayout{tp:1,pp,dp}}, num_microbatches:m, pipeline_order: PipelineOrder::OneFOneB, memory_budget_bytes: None};
            let s = StepScheduler::new(st, CostModel::new(&fixture::model_profile()).unwrap(), shapes, 1).unwrap();
            let batch: Vec<_> = (0..n as u32).map(SampleIndex).collect();
            let x = s.schedule(0,&batch,Arm::Aware).unwrap();
            a += x.predicted_makespan_ns; b += s.schedule(0,&batch,Arm::Blind).unwrap().predicted_makespan_ns;
            lb += x.max_load_ns * u64::from(m);
        }
        println!("n {n} m {m} e{e} pp{pp} dp{dp}: aware {:.1} blind {:.1} ratio {:.4} load {:.4} {:?}", a as f64/8e6, b as f64/8e6, a as f64/b as f64, lb as f64 / b as f64, t.elapsed()/8);
    }
}

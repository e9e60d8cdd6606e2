//! Render: plan, timelines and profiles in, one HTML file out.

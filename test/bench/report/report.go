// Package report holds the results of a benchmark and prints them as a table or as JSON. The
// results are rows of durations with percentiles and their ratios to another row, and goals that
// are met or not.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// Report has all results of a benchmark run.
type Report struct {
	Machine string  `json:"machine"`
	Rows    []*Row  `json:"rows"`
	Goals   []*Goal `json:"goals"`
}

// Row has the durations of one kind of work by one program, in milliseconds.
type Row struct {
	Work    string `json:"work"`
	Program string `json:"program"`
	Count   int    `json:"count"`

	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	// PerSecond is how many pieces of work were done per second.
	PerSecond float64 `json:"perSecond"`
	// Of names the row with which this one is compared. Ratio50 and Ratio99 are this row's percentiles
	// divided by the same percentiles of that row.
	Of      string  `json:"of,omitempty"`
	Ratio50 float64 `json:"ratio50,omitempty"`
	Ratio99 float64 `json:"ratio99,omitempty"`
}

// Goal is a measured figure with an upper limit, or a lower one if AtLeast is set.
type Goal struct {
	What     string  `json:"what"`
	Program  string  `json:"program"`
	Measured float64 `json:"measured"`
	Limit    float64 `json:"limit"`
	AtLeast  bool    `json:"atLeast,omitempty"`
	Unit     string  `json:"unit,omitempty"`
	// Timed is set when the figure depends on how fast and how busy the machine is.
	Timed bool `json:"timed"`
}

// Met reports whether the measured figure is within the goal's limit.
func (g *Goal) Met() bool {
	if g.AtLeast {
		return g.Measured >= g.Limit
	}
	return g.Measured <= g.Limit
}

// Samples are the measured durations of one kind of work.
type Samples struct {
	All []time.Duration
	// Within is the time from the start of the first piece of work to the end of the last. If it is
	// zero, the sum of the durations counts instead, as for work that was not done in parallel.
	Within time.Duration
}

// Time runs work and adds its duration to the samples.
func (s *Samples) Time(work func() error) error {
	begin := time.Now()
	err := work()
	s.All = append(s.All, time.Since(begin))
	return err
}

// Percentile returns the p-th percentile, or 0 if there are no samples.
func (s *Samples) Percentile(p int) time.Duration {
	if len(s.All) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s.All))
	return sorted[min(len(sorted)*p/100, len(sorted)-1)]
}

// Add appends a row with the percentiles of the samples to the report.
func (r *Report) Add(work, program string, s *Samples) *Row {
	within := s.Within
	if within == 0 {
		for _, d := range s.All {
			within += d
		}
	}
	row := &Row{
		Work: work, Program: program, Count: len(s.All),
		P50: ms(s.Percentile(50)), P90: ms(s.Percentile(90)), P99: ms(s.Percentile(99)),
	}
	if within > 0 {
		row.PerSecond = float64(len(s.All)) / within.Seconds()
	}
	r.Rows = append(r.Rows, row)
	return row
}

// Compare stores the name of the other row, which is in parameter of, and the ratios of this row's
// percentiles to those of the other row.
func (row *Row) Compare(of *Row) *Row {
	row.Of = of.Work
	if of.Program != row.Program {
		row.Of = of.Program
	}
	row.Ratio50, row.Ratio99 = row.P50/of.P50, row.P99/of.P99
	return row
}

// AtMost adds a goal with an upper limit.
func (r *Report) AtMost(what, program string, measured, limit float64, unit string) *Goal {
	g := &Goal{What: what, Program: program, Measured: measured, Limit: limit, Unit: unit, Timed: true}
	r.Goals = append(r.Goals, g)
	return g
}

// AtLeast adds a goal with a lower limit.
func (r *Report) AtLeast(what, program string, measured, limit float64, unit string) *Goal {
	g := r.AtMost(what, program, measured, limit, unit)
	g.AtLeast = true
	return g
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// JSON writes the report as JSON.
func (r *Report) JSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

// Table writes the report as a table.
func (r *Report) Table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%s\n\n", r.Machine)
	fmt.Fprintln(t, "work\tprogram\tn\tp50 ms\tp90 ms\tp99 ms\tper s\tp50 to\tp99 to\tof")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%d\t%.2f\t%.2f\t%.2f\t%.1f\t%s\t%s\t%s\n", row.Work, row.Program, row.Count,
			row.P50, row.P90, row.P99, row.PerSecond, ratio(row.Ratio50), ratio(row.Ratio99), row.Of)
	}
	fmt.Fprintln(t, "\ngoal\tprogram\tmeasured\tgoal\t")
	for _, g := range r.Goals {
		sign, verdict := "≤", ""
		if g.AtLeast {
			sign = "≥"
		}
		if !g.Met() {
			verdict = "NOT MET"
		}
		fmt.Fprintf(t, "%s\t%s\t%.3g %s\t%s %g\t%s\n", g.What, g.Program, g.Measured, g.Unit, sign, g.Limit, verdict)
	}
	return t.Flush()
}

func ratio(of float64) string {
	if of == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", of)
}

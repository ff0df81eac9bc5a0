package schedules

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Coverage counts how often each fault interrupted each kind of call of the plugin (see [step]).
type Coverage struct {
	mu    sync.Mutex
	cells map[step]map[fault]int
	steps map[step]int
}

// NewCoverage returns a table in which every count is zero.
func NewCoverage() *Coverage {
	return &Coverage{cells: map[step]map[fault]int{}, steps: map[step]int{}}
}

func (c *Coverage) count(s step, f fault) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.steps[s]++
	if f == none {
		return
	}
	if c.cells[s] == nil {
		c.cells[s] = map[fault]int{}
	}
	c.cells[s][f]++
}

// Missing lists the possible combinations of step and fault that occurred fewer times than the
// parameter least. It also lists steps that occurred but are missing in the list classes.
func (c *Coverage) Missing(least int) []string {
	var missing []string
	for _, s := range classes {
		for _, f := range s.step.possible() {
			if n := c.cells[s.step][f]; n < least {
				missing = append(missing, fmt.Sprintf("%s, %s: %d", s.step, f, n))
			}
		}
	}
	for s := range c.steps {
		if _, known := s.class(); !known {
			missing = append(missing, fmt.Sprintf("%s: not in the table", s))
		}
	}
	return missing
}

// Table returns a Markdown table with a row for each step and a column for each fault. An empty
// table cell means that the fault is impossible at that step.
func (c *Coverage) Table() string {
	var b strings.Builder
	b.WriteString("| step | times |")
	line := "|---|--:|"
	for _, f := range faults {
		fmt.Fprintf(&b, " %s |", f.fault)
		line += "--:|"
	}
	b.WriteString("\n" + line + "\n")
	for _, s := range classes {
		fmt.Fprintf(&b, "| %s | %d |", s.step, c.steps[s.step])
		for _, f := range faults {
			if slices.Contains(s.step.possible(), f.fault) {
				fmt.Fprintf(&b, " %d |", c.cells[s.step][f.fault])
			} else {
				b.WriteString(" |")
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

package schedules

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Coverage counts which steps have met which faults.
type Coverage struct {
	mu    sync.Mutex
	cells map[step]map[fault]int
	steps map[step]int
}

// NewCoverage has met nothing.
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

// Missing lists the cells that can happen and were met less often than that, and the steps that the table does not know.
func (c *Coverage) Missing(least int) []string {
	var missing []string
	for _, s := range classes {
		for _, f := range s.step.can() {
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

// Table is a table in Markdown: a line a step, a column a fault; cells that cannot happen are empty.
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
			if slices.Contains(s.step.can(), f.fault) {
				fmt.Fprintf(&b, " %d |", c.cells[s.step][f.fault])
			} else {
				b.WriteString(" |")
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

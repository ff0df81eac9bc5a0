package schedules

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Coverage counts how often each fault interrupted each [faultPoint].
type Coverage struct {
	mu     sync.Mutex
	cells  map[faultPoint]map[fault]int
	points map[faultPoint]int
}

// NewCoverage returns a table in which every count is zero.
func NewCoverage() *Coverage {
	return &Coverage{cells: map[faultPoint]map[fault]int{}, points: map[faultPoint]int{}}
}

func (c *Coverage) count(point faultPoint, f fault) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.points[point]++
	if f == none {
		return
	}
	if c.cells[point] == nil {
		c.cells[point] = map[fault]int{}
	}
	c.cells[point][f]++
}

// Missing lists the cells that occurred fewer times than least. It also lists fault points that
// were reached but are missing in the list classes.
func (c *Coverage) Missing(least int) []string {
	var missing []string
	for _, row := range classes {
		for _, f := range row.point.possible() {
			if n := c.cells[row.point][f]; n < least {
				missing = append(missing, fmt.Sprintf("%s, %s: %d", row.point, f, n))
			}
		}
	}
	for point := range c.points {
		if _, known := point.class(); !known {
			missing = append(missing, fmt.Sprintf("%s: not in the table", point))
		}
	}
	return missing
}

// Table returns a Markdown table with a row for each fault point and a column for each fault. An
// empty cell means that the fault is impossible there.
func (c *Coverage) Table() string {
	var b strings.Builder
	b.WriteString("| fault point | times |")
	line := "|---|--:|"
	for _, f := range faults {
		fmt.Fprintf(&b, " %s |", f.fault)
		line += "--:|"
	}
	b.WriteString("\n" + line + "\n")
	for _, s := range classes {
		fmt.Fprintf(&b, "| %s | %d |", s.point, c.points[s.point])
		for _, f := range faults {
			if slices.Contains(s.point.possible(), f.fault) {
				fmt.Fprintf(&b, " %d |", c.cells[s.point][f.fault])
			} else {
				b.WriteString(" |")
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

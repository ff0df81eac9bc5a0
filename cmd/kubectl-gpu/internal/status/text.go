package status

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/paint"
)

// Text writes one line for each node, or with detail one for each GPU.
func (r Report) Text(w io.Writer, detail bool) {
	if len(r.Nodes) == 0 {
		fmt.Fprintln(w, "No node publishes GPUs. Run kubectl gpu doctor.")
		return
	}
	if detail {
		for i, n := range r.Nodes {
			if i > 0 {
				fmt.Fprintln(w)
			}
			n.text(w)
		}
	} else {
		r.table(w)
	}
	for i, m := range r.Moves {
		if i == 0 {
			fmt.Fprintln(w, "\nNodes without a free GPU, and the claims to move for one")
		}
		fmt.Fprintf(w, "  %s, %s: %s\n", m.Node, m.GPU, strings.Join(m.Claims, ", "))
	}
}

func (r Report) table(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	defer func() { _ = t.Flush() }()
	fmt.Fprintln(t, "NODE\tGPUS\tFREE\tCLAIMS\tTAINTED\tLARGEST FREE\tNOTE")
	for _, n := range r.Nodes {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%s\t%s\n", n.Name, len(n.GPUs), n.Free, n.Claims, n.Tainted, orDash(n.Largest), n.note())
	}
}

func (n Node) note() string {
	var notes []string
	if n.Cordoned {
		notes = append(notes, "cordoned")
	}
	if n.Incomplete {
		notes = append(notes, "slices are being updated")
	}
	return strings.Join(notes, ", ")
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// freeText is what of the GPU is free: the largest device, and shares of a device that has some.
func (g GPU) freeText() string {
	free := g.Shares
	if g.Largest != "" {
		free = append([]string{g.Largest}, free...)
	}
	return orDash(strings.Join(free, ", "))
}

func (n Node) text(w io.Writer) {
	fmt.Fprint(w, paint.Strong(w, n.Name))
	if note := n.note(); note != "" {
		fmt.Fprintf(w, " (%s)", paint.Careful(w, note))
	}
	fmt.Fprintln(w)
	for _, g := range n.GPUs {
		fmt.Fprintf(w, "  %s  [%s]  %s, free: %s\n", g.Name, g.Bar, g.Product, g.freeText())
		for _, t := range g.Taints {
			fmt.Fprintf(w, "      %s\n", paint.Careful(w, "taint "+t))
		}
		for _, h := range g.Holders {
			idle := ""
			if h.Pods == 0 {
				idle = ", which no Pod uses"
			}
			share := ""
			if h.Share != "" {
				share = " with " + h.Share
			}
			fmt.Fprintf(w, "      %s  %s%s: %s%s\n", h.Letter, h.What, share, h.Claim, idle)
		}
	}
}

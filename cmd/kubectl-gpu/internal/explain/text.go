package explain

import (
	"fmt"
	"io"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/paint"
)

// Text writes the report for people. With wide it lists every node, otherwise nodes with the same
// reasons count as one line.
func (r *Report) Text(w io.Writer, wide bool) {
	fmt.Fprintln(w, paint.Strong(w, r.Summary))
	for _, a := range r.Asked {
		fmt.Fprintf(w, "  Claim %s, request %s: %s\n", a.Claim, a.Request, a.Sentence)
	}
	if len(r.Reasons) > 0 {
		fmt.Fprintln(w, paint.Strong(w, "\nReasons"))
		for _, reason := range r.Reasons {
			fmt.Fprintf(w, "  - %s\n", reason.Sentence)
		}
	}
	if r.State == Waits || wide {
		r.nodes(w, wide)
	}
	if len(r.Remedies) > 0 {
		fmt.Fprintln(w, paint.Strong(w, "\nWhat would make it fit (one of these)"))
		for _, remedy := range r.Remedies {
			var parts []string
			for _, c := range remedy.Changes {
				parts = append(parts, c.Sentence)
			}
			fmt.Fprintf(w, "  - %s: %s\n", remedy.Node, strings.Join(parts, ", and "))
		}
	} else if r.State == Waits {
		fmt.Fprintln(w, "\nNo change of one node or of the claim that this program tries would make it fit.")
	}
	for _, c := range r.Claims {
		c.text(w)
	}
	for _, note := range r.Notes {
		fmt.Fprintf(w, "\nNote: %s\n", note)
	}
}

// nodes writes the nodes, those with equal reasons together.
func (r *Report) nodes(w io.Writer, wide bool) {
	type line struct {
		names   []string
		reasons []string
	}
	var lines []*line
	index := map[string]*line{}
	for _, n := range r.Nodes {
		var reasons []string
		several := len(r.Asked) > 1
		for _, reason := range n.Reasons {
			s := reason.Sentence
			if several && reason.Request != "" {
				s = fmt.Sprintf("request %s: %s", reason.Request, s)
			}
			reasons = append(reasons, s)
		}
		if n.Fits {
			reasons = []string{paint.Good(w, "fits")}
		}
		k := strings.Join(reasons, "\n")
		if wide {
			k = n.Name
		}
		if index[k] == nil {
			index[k] = &line{reasons: reasons}
			lines = append(lines, index[k])
		}
		index[k].names = append(index[k].names, n.Name)
	}
	if len(lines) > 0 {
		fmt.Fprintln(w, paint.Strong(w, "\nNodes"))
	}
	const shown = 12
	for i, l := range lines {
		if i == shown && !wide {
			fmt.Fprintf(w, "  … and %s with other reasons (-o wide lists all)\n", count(len(lines)-shown, "more group"))
			return
		}
		fmt.Fprintf(w, "  %s\n", some(l.names))
		for _, reason := range l.reasons {
			fmt.Fprintf(w, "    - %s\n", reason)
		}
	}
}

func (c Claim) text(w io.Writer) {
	fmt.Fprintf(w, "\nClaim %s\n", c.Name)
	if c.Problem != "" {
		fmt.Fprintf(w, "  %s\n", paint.Bad(w, "Problem: "+c.Problem))
	}
	for _, d := range c.Devices {
		fmt.Fprintf(w, "  %s: %s, %s on %s", d.Request, d.What, d.Device, d.Node)
		if d.Share != "" {
			fmt.Fprintf(w, " (%s)", d.Share)
		}
		if d.Admin {
			fmt.Fprint(w, " with admin access")
		}
		fmt.Fprintln(w)
		if !d.Published {
			fmt.Fprintln(w, "    The driver no longer publishes this device.")
		}
		if len(d.Sharers) > 0 {
			fmt.Fprintf(w, "    Shared with %s\n", some(d.Sharers))
		}
		for _, t := range d.Taints {
			fmt.Fprintf(w, "    %s\n", paint.Careful(w, "Taint "+t))
		}
		for _, condition := range d.Conditions {
			fmt.Fprintf(w, "    %s=%s %s %s\n", condition.Type, condition.Status, condition.Reason, condition.Message)
		}
		for _, s := range d.Settings {
			fmt.Fprintf(w, "    %s = %s (%s)\n", s.Name, s.Value, s.From)
		}
	}
}

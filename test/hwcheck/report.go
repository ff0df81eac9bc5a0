package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// finish writes the report to the folder for reports and to out. It returns the exit code.
func (s *visit) finish(out io.Writer) (int, error) {
	code := verdict(s.report.Checks)
	s.report.Agreed = code == exitAgreed
	if err := os.MkdirAll(s.out, 0o755); err != nil { //nolint:gosec // to be read by everyone
		return exitDiffered, fmt.Errorf("make the report's folder: %w", err)
	}
	text := s.markdown()
	if err := os.WriteFile(filepath.Join(s.out, "report.md"), []byte(text), 0o644); err != nil { //nolint:gosec // to be read by everyone
		return exitDiffered, fmt.Errorf("write the report: %w", err)
	}
	if err := facts.Write(filepath.Join(s.out, "facts.json"), s.report); err != nil {
		return exitDiffered, fmt.Errorf("write the facts: %w", err)
	}
	fmt.Fprintf(s.progress, "\nThe report is in %s (report.md, facts.json).\n\n", s.out)
	_, err := io.WriteString(out, text)
	return code, err
}

// verdict returns the exit code for the worst verdict in the report. If there is no verdict at all,
// the code says that nothing was proven.
func verdict(checks []facts.Check) int {
	code := exitAgreed
	if len(checks) == 0 {
		code = exitNotProven
	}
	for _, c := range checks {
		switch c.Verdict {
		case facts.Agreed, facts.Recorded:
		case facts.NotProven:
			code = exitNotProven
		default:
			return exitDiffered
		}
	}
	return code
}

func (s *visit) markdown() string {
	b, whole := &strings.Builder{}, time.Duration(0)
	fmt.Fprintf(b, "# Check of real hardware: %s\n\n%s\n\n", s.title(), promise)
	if s.report.Driver != nil && s.report.Driver.Simulated {
		fmt.Fprint(b, "**The driver is simulated. This report proves nothing about hardware.**\n\n")
	}
	fmt.Fprintf(b, "%s, plugin %s, %s, kernel %s, %s, cgroups %s.\n",
		s.report.Date, s.report.Plugin, s.report.Machine.Architecture, s.report.Machine.Kernel,
		orNone(s.report.Machine.OS), s.report.Machine.Cgroups)
	fmt.Fprint(b, "\n## Verdicts\n\n| check | verdict | took | what was found |\n|---|---|--:|---|\n")
	for _, c := range s.report.Checks {
		fmt.Fprintf(b, "| %s | **%s** | %d ms | %s |\n", c.Name, c.Verdict, c.Millis, cell(c.Detail))
		whole += time.Duration(c.Millis) * time.Millisecond
	}
	fmt.Fprintf(b, "\nAll checks took %s of %s.\n", whole.Round(time.Second), s.limit)
	s.writeMachine(b)
	s.writeGPUs(b)
	s.writeLibraries(b)
	s.writeGetters(b)
	fmt.Fprint(b, "\n## What the programs printed\n")
	for _, p := range s.shown {
		fence := "```"
		for strings.Contains(p.text, fence) {
			fence += "`"
		}
		fmt.Fprintf(b, "\n### %s\n\n%s%s\n%s\n%s\n", p.title, fence, p.language, p.text, fence)
	}
	return b.String()
}

func (s *visit) title() string {
	if s.report.NVML == nil || len(s.report.NVML.GPUs) == 0 {
		return "no GPU answered"
	}
	counts := map[string]int{}
	var order []string
	for _, g := range s.report.NVML.GPUs {
		if counts[g.Name]++; counts[g.Name] == 1 {
			order = append(order, g.Name)
		}
	}
	for i, name := range order {
		order[i] = fmt.Sprintf("%d × %s", counts[name], name)
	}
	return strings.Join(order, ", ") + ", driver " + s.report.NVML.DriverVersion
}

func (s *visit) writeMachine(b *strings.Builder) {
	fmt.Fprint(b, "\n## Machine and driver\n\n")
	for _, f := range s.report.Machine.PCI {
		fmt.Fprintf(b, "- PCI %s: device %s, kernel driver %s\n", f.Address, f.Device, orNone(f.Driver))
	}
	if len(s.report.Machine.PCI) == 0 {
		fmt.Fprint(b, "- no NVIDIA display controller in sysfs\n")
	}
	fmt.Fprintf(b, "- device nodes: %s; %d links to them in /dev/char\n",
		orNone(strings.Join(s.report.Machine.DeviceNodes, ", ")), s.report.Machine.NumberLinks)
	if k := s.report.Machine.KernelDriver; k != nil {
		fmt.Fprintf(b, "- kernel driver: %s\n- its majors: %s\n- its capabilities: %s\n- its parameters: %s\n", k.Version,
			orNone(strings.Join(k.Majors, ", ")), orNone(strings.Join(k.Capabilities, ", ")), orNone(strings.Join(k.Parameters, ", ")))
	}
	if d := s.report.Driver; d != nil {
		fmt.Fprintf(b, "- driver root `%s`, NVML `%s`, device nodes below `%s`\n", d.Root, d.Library, d.DevRoot)
		for _, p := range d.Passed {
			fmt.Fprintf(b, "- rejected: %s\n", cell(p))
		}
	}
}

func (s *visit) writeGPUs(b *strings.Builder) {
	if s.report.NVML == nil {
		return
	}
	fmt.Fprintf(b, "\n## NVML's answers\n\nDriver %s, CUDA %s.\n\n", s.report.NVML.DriverVersion, s.report.NVML.CUDAVersion)
	fmt.Fprint(b, "| GPU | PCI address | PCI ID | subsystem | memory MiB | CUDA capability | MIG profiles "+
		"| model file | differences |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, g := range s.report.NVML.GPUs {
		fmt.Fprintf(b, "| %s | %s | %s | %s | %d | %s | %d | %s | %d |\n",
			g.Name, g.PCIAddress, g.PCIDeviceID, g.PCISubsystemID, g.MemoryTotalMiB,
			g.ComputeCapability, len(g.Profiles), orNone(g.Model), len(g.Differences))
	}
	for _, g := range s.report.NVML.GPUs {
		for _, d := range g.Differences {
			fmt.Fprintf(b, "\n- %s, %s: the model file says %s, NVML %s", g.PCIAddress, d.What, d.Want, d.Got)
		}
		for question, answer := range g.Unanswered {
			fmt.Fprintf(b, "\n- %s, %s: not answered (%s)", g.PCIAddress, question, answer)
		}
	}
	fmt.Fprintln(b)
}

func (s *visit) writeLibraries(b *strings.Builder) {
	if s.report.Libraries == nil {
		return
	}
	fmt.Fprintf(b, "\n## C library\n\n%s is glibc %s.\n\n", orNone(s.report.Libraries.CLibrary), orNone(s.report.Libraries.GLIBC))
	fmt.Fprint(b, "| file | needs glibc | needs the libraries |\n|---|---|---|\n")
	for _, f := range s.report.Libraries.Files {
		fmt.Fprintf(b, "| %s | %s | %s |\n", f.Name, orNone(f.GLIBC), orNone(strings.Join(f.Needed, ", ")))
	}
}

// writeGetters writes the differences between the two processes, and the answers to the one with
// more capabilities.
func (s *visit) writeGetters(b *strings.Builder) {
	if s.report.Getters == nil {
		return
	}
	fmt.Fprint(b, "\n## NVML's getters\n")
	answers, title := s.report.Getters.Privileged, "With CAP_SYS_ADMIN"
	if answers == nil {
		answers, title = s.report.Getters.Unprivileged, "Without capabilities"
	} else {
		differences := differentAnswers(s.report.Getters)
		fmt.Fprintf(b, "\nWithout capabilities %d answers differ.\n\n", len(differences))
		for _, difference := range differences {
			fmt.Fprintf(b, "- %s\n", difference)
		}
	}
	fmt.Fprintf(b, "\n%s:\n\n| question | answer |\n|---|---|\n", title)
	for _, question := range slices.Sorted(maps.Keys(answers)) {
		fmt.Fprintf(b, "| %s | %s |\n", cell(question), cell(answers[question].String()))
	}
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}

// cell returns the text in a form that can be put into a cell of a Markdown table.
func cell(text string) string {
	return strings.NewReplacer("\n", " / ", "|", "\\|").Replace(text)
}

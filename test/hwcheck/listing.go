package main

import (
	"context"
	"regexp"
	"slices"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

var uuidForm = regexp.MustCompile(`\(UUID: (GPU-[0-9a-f-]+)\)`)

// checkListing runs nvidia-smi -L in containers with no GPU, one GPU and all GPUs. It adds to the
// report whether nvidia-smi lists exactly the GPUs that the container was given.
func (s *visit) checkListing(ctx context.Context, c *containers, offered []offer) {
	set := c.specs
	host, inside, ok := set.mounted(nvidiaSMI)
	smi := guest{host: host, inside: inside}
	if !ok {
		s.add("nvidia-smi in a container", facts.NotProven, "%v", errNoSMI)
		return
	}
	cases := []struct {
		name  string
		given []offer
	}{
		{"a container with the base spec alone sees no GPU", nil},
		{"a container with one GPU sees only that GPU", offered[:1]},
		{"a container with all GPUs sees all", offered},
	}
	for _, x := range cases {
		if len(x.given) == 1 && len(offered) == 1 && x.name == cases[2].name {
			continue // the case with one GPU was the same
		}
		devices, err := set.devices(x.given)
		if err != nil {
			s.add(x.name, facts.Failed, "%v", err)
			return
		}
		result := c.run(ctx, smi, devices, "-L")
		if ctx.Err() != nil {
			return // the output of an interrupted run proves nothing
		}
		s.show("nvidia-smi -L: "+x.name, "", result.stdout+result.stderr)
		s.judgeListing(x.name, c, x.given, result)
	}
	devices, err := set.devices(offered)
	if err != nil {
		s.add("nvidia-smi prints its table in a container", facts.Failed, "%v", err)
		return
	}
	result := c.run(ctx, smi, devices)
	if ctx.Err() != nil {
		return
	}
	s.show("nvidia-smi in a container with all GPUs", "", result.stdout+result.stderr)
	s.judgeTable(c, result)
}

func (s *visit) judgeTable(c *containers, result outcome) {
	const name = "nvidia-smi prints its table in a container"
	version := ""
	if s.report.NVML != nil {
		version = s.report.NVML.DriverVersion
	}
	switch reservations := c.reservations(); {
	case result.err != nil:
		s.add(name, facts.Failed, "%s", lastLines(result.summary(), 3))
	case version == "" || !strings.Contains(result.stdout, version):
		s.add(name, facts.Differed, "nvidia-smi does not name driver %s", orNone(version))
	case reservations != "":
		s.add(name, facts.NotProven, "nvidia-smi names driver %s, but %s", version, reservations)
	default:
		s.add(name, facts.Agreed, "nvidia-smi names driver %s", version)
	}
}

// timeSliceRow is the row of a GPU in the table of time-slices, with a value that the plugin knows.
var timeSliceRow = regexp.MustCompile(`(?mi)^\|\s+\d+\s+Timeslice\s+(Default|Short|Medium|Long)\s+\|$`)

// checkTimeSlice lists the time-slices in a container with one GPU. It adds to the report whether
// the plugin can read the table.
func (s *visit) checkTimeSlice(ctx context.Context, c *containers, given offer) {
	host, inside, ok := c.specs.mounted(nvidiaSMI)
	if !ok {
		return // checkListing reported it
	}
	devices, err := c.specs.devices([]offer{given})
	if err != nil {
		s.add(timeSliceCheck, facts.Failed, "%v", err)
		return
	}
	result := c.run(ctx, guest{host: host, inside: inside}, devices, timeSliceArguments...)
	if ctx.Err() != nil {
		return
	}
	s.show("nvidia-smi "+strings.Join(timeSliceArguments, " "), "", result.stdout+result.stderr)
	s.judgeTimeSlice(c, result)
}

const timeSliceCheck = "the plugin can read the time-slice"

// judgeTimeSlice accepts a GPU without time-slices, because the plugin refuses claims for one
// there.
func (s *visit) judgeTimeSlice(c *containers, result outcome) {
	rows := timeSliceRow.FindAllStringSubmatch(result.stdout, -1)
	switch {
	case result.err != nil && strings.Contains(strings.ToLower(result.summary()), "not supported"):
		s.add(timeSliceCheck, facts.Agreed, "this GPU has none: %s", lastLines(result.summary(), 1))
	case result.err != nil:
		s.add(timeSliceCheck, facts.Failed, "%s", lastLines(result.summary(), 3))
	case c.way != onTheMachine && len(rows) != 1, len(rows) == 0:
		s.add(timeSliceCheck, facts.Differed, "%d rows of time-slices that the plugin can read", len(rows))
	default:
		s.add(timeSliceCheck, facts.Agreed, "it is %s", rows[0][1])
	}
}

func (s *visit) judgeListing(name string, c *containers, given []offer, result outcome) {
	var seen []string
	for _, match := range uuidForm.FindAllStringSubmatch(result.stdout, -1) {
		seen = append(seen, match[1])
	}
	slices.Sort(seen)
	reservations := c.reservations()
	switch want := uuidsOf(given); {
	case c.way == onTheMachine && result.err == nil:
		s.add(name, facts.NotProven, "nvidia-smi lists %d GPUs; %s", len(seen), reservations)
	case len(given) > 0 && result.err != nil:
		s.add(name, facts.Failed, "nvidia-smi -L: %s", lastLines(result.summary(), 3))
	case !slices.Equal(seen, want):
		s.add(name, facts.Differed, "nvidia-smi lists %v, and the container has %v", seen, want)
	case reservations != "":
		s.add(name, facts.NotProven, "nvidia-smi lists exactly the GPUs of the container, but %s", reservations)
	case len(given) == 0:
		s.add(name, facts.Agreed, "nvidia-smi: %s", lastLines(result.summary(), 1))
	default:
		s.add(name, facts.Agreed, "nvidia-smi lists exactly the GPUs of the container: %s", strings.Join(seen, ", "))
	}
}

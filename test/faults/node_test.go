package faults

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

const (
	gpu0 = "gpu-0000-1b-00-0"
	gpu1 = "gpu-0000-1c-00-0"
)

// parallel is the number of tests that run in parallel. They mostly wait.
const parallel = "12"

func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.parallel", parallel)
	os.Exit(nodeharness.Main(m, runRole))
}

// testNode is a node with two H100s and an API server. A MIG instance of an admin takes half of the
// second GPU.
type testNode struct {
	nodeharness.Node
	api            nodeharness.API
	adminInstances []device.Instance
}

func newTestNode(t *testing.T) *testNode {
	t.Helper()
	s := &testNode{Node: nodeharness.New(t, "0000:1b:00.0", "0000:1c:00.0"), api: nodeharness.NewAPI()}
	s.addAdminInstance(t)
	return s
}

// plugin is the plugin's code for Prepare and Unprepare in one process.
type plugin struct{ *nodeharness.Plugin }

// newPlugin starts the plugin's code for Prepare and Unprepare. It does not recover claims that an
// earlier process has prepared.
func (s *testNode) newPlugin(ctx context.Context) (*plugin, error) {
	p, err := s.Plugin(ctx, durable.OS{}, func(context.Context, string, string) (*resourceapi.ResourceClaim, error) {
		return nil, errors.New("unexpected second read of a claim")
	})
	return &plugin{p}, err
}

func (p *plugin) card(gpu string) device.Card {
	for _, g := range p.Snapshot().Node.GPUs {
		if g.WholeName() == gpu {
			return g.Card()
		}
	}
	return device.Card{}
}

// operation names the call of Prepare or Unprepare that the test disturbs by a fault.
type operation string

const (
	prepareParts   operation = "prepare partitions"
	unprepareParts operation = "unprepare partitions"
	prepareWhole   operation = "prepare a partitioned GPU as a whole"
)

var operations = []operation{prepareParts, unprepareParts, prepareWhole}

var (
	parts = nodeharness.Claim("parts", gpu0+"-mig-19-0", gpu0+"-mig-9-4", gpu1+"-mig-19-6")
	whole = nodeharness.Claim("whole", gpu0)
)

func (p *plugin) do(ctx context.Context, o operation) (err error) {
	switch o {
	case prepareParts:
		_, err = p.Prepare(ctx, parts)
	case unprepareParts:
		err = p.Unprepare(ctx, parts.UID)
	case prepareWhole:
		_, err = p.Prepare(ctx, whole)
	}
	return err
}

// runRole runs the operation named o in a child process. It waits until its standard input has a
// line, because the test injects the fault before it writes that line.
func runRole(ctx context.Context, n nodeharness.Node, o string) error {
	p, err := (&testNode{Node: n}).newPlugin(ctx)
	if err != nil {
		return err
	}
	defer nvidiatest.StopWorkers(p.Worker)
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil { // the test has injected the fault by now
		return err
	}
	return p.do(ctx, operation(o))
}

// check returns an error unless hardware, checkpoint records and CDI specs agree and the node still
// has exactly the admin's MIG instances in adminInstances.
func (p *plugin) check(ctx context.Context, adminInstances []device.Instance) error {
	var errs []error
	report := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	specified, err := p.Specs.Claims()
	if err != nil {
		return err
	}
	entries, err := p.Records.List()
	if err != nil {
		return err
	}
	held := 0
	for _, e := range entries {
		r, _, err := p.Records.Load(e.ClaimUID)
		if err != nil || r.State != checkpoint.Prepared {
			report("the record of %s says %s: %w", e.ClaimUID, r.State, err)
		}
		if !slices.Contains(specified, e.ClaimUID) {
			report("%s has no spec", e.ClaimUID)
		}
		for _, d := range r.Devices {
			if strings.Contains(d.Device, "-mig-") {
				held++
			}
		}
	}
	if len(specified) != len(entries) {
		report("%v have specs, but there are %d records", specified, len(entries))
	}
	for _, gpu := range []string{gpu0, gpu1} {
		there, foreign, err := p.ForeignInstances(ctx, p.card(gpu), gpu)
		if err != nil {
			return err
		}
		held -= len(there) - len(foreign)
		want := adminInstances
		if gpu == gpu0 {
			want = nil
		}
		if !slices.EqualFunc(foreign, want, func(a, b device.Instance) bool {
			return a.ID == b.ID && a.Placement == b.Placement && len(a.Compute) == 1 && a.Compute[0].UUID == b.Compute[0].UUID
		}) {
			report("%s has foreign instances %+v, want %+v", gpu, foreign, want)
		}
	}
	if held != 0 {
		report("claims hold %d partitions more than exist", held)
	}
	return errors.Join(errs...)
}

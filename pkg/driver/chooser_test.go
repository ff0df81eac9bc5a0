package driver

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/tools/record"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// appliedSettings records the MIG modes that a chooser applies.
type appliedSettings struct {
	mu    sync.Mutex
	modes []string
}

func (a *appliedSettings) apply(s settings.Settings) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.modes = append(a.modes, string(s.Policies.For(device.GPU{}).Mode))
}

func (a *appliedSettings) all() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(a.modes, " ")
}

// Under the values for all nodes the plugin could destroy partitions that the node's configuration
// keeps.
func TestWrongLabelAtStartAppliesNothing(t *testing.T) {
	document, err := settings.Parse([]byte("{mig: {policy: adopt}, configurations: {keep: {mig: {policy: static}}}}"))
	if err != nil {
		t.Fatal(err)
	}
	applied, recorded := &appliedSettings{}, record.NewFakeRecorder(10)
	c := &chooser{document: document, events: events.NewFor(recorded, "node"), apply: applied.apply}
	c.SetLabels(t.Context(), map[string]string{settings.Label: "kept"})
	got := <-recorded.Events
	if applied.all() != "" || !strings.Contains(got, "No partitions are changed") || !strings.Contains(got, `"kept"`) {
		t.Errorf("applied %q, and wrote the Event %q", applied.all(), got)
	}
	c.SetLabels(t.Context(), map[string]string{settings.Label: "keep"})
	if applied.all() != "static" {
		t.Errorf("applied %q", applied.all())
	}
}

func TestConfigurationFollowsLabelsAndFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "settings.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	write("configurations: {train: {mig: {policy: dynamic}}}")
	document, err := settings.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	applied, recorded := &appliedSettings{}, record.NewFakeRecorder(10)
	c := &chooser{file: file, document: document, events: events.NewFor(recorded, "node"), apply: applied.apply}
	expect := func(modes string, event ...string) {
		t.Helper()
		eventually(t, modes, func() bool { return applied.all() == modes })
		if len(event) == 0 {
			return
		}
		got := <-recorded.Events
		for _, want := range event {
			if !strings.Contains(got, want) {
				t.Errorf("the Event is %q, want %q", got, want)
			}
		}
	}

	c.SetLabels(t.Context(), map[string]string{})
	expect("static", "ConfigurationInForce", "Configuration default is in force")
	c.SetLabels(t.Context(), map[string]string{"other": "label"})
	c.SetLabels(t.Context(), map[string]string{settings.Label: "train"})
	expect("static dynamic", "Normal ConfigurationInForce", "Configuration train is in force", settings.Label)
	c.SetLabels(t.Context(), map[string]string{settings.Label: "trian"})
	expect("static dynamic", "Warning ConfigurationIgnored", `"trian"`, "default, train")
	c.SetLabels(t.Context(), map[string]string{settings.Label: "train"})

	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.WatchFile(ctx) }()
	write("configurations:\n  train:\n    mig: {policy: adopt}")
	expect("static dynamic adopt", "Normal ConfigurationInForce", "Configuration train")
	write("configurations:\n  train:\n    mig:\n      policy: nonsense")
	expect("static dynamic adopt", "Warning ConfigurationIgnored", file, "line 4: configurations[train].mig.policy")
	write("configurations: {}")
	expect("static dynamic adopt", "Warning ConfigurationIgnored", `"train", which does not exist`)
	write("configurations: {train: {mig: {policy: \"off\"}}}")
	expect("static dynamic adopt off", "Normal ConfigurationInForce")
	stop()
	<-done
}

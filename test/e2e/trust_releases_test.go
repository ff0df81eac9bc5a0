package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// nextImage is the image of a faked later release of the driver.
const nextImage = "localhost/gpu-dra-driver:next"

// nextRelease changes this source into a faked later release: for each file, texts to replace, each
// followed by its replacement. The later release writes checkpoint records with a higher format
// version and an additional field.
var nextRelease = map[string][]string{
	"pkg/checkpoint/store.go": {
		`statefile.Format{Kind: "ClaimRecord", Version: 1, MinReader: 1}`,
		`statefile.Format{Kind: "ClaimRecord", Version: 2, MinReader: 1}`,
		"func (s *Store) Save(r Record) error {\n",
		"func (s *Store) Save(r Record) error {\n	r.AddedByNext = \"added\"\n",
	},
	"pkg/checkpoint/record.go": {
		"type Record struct {\n",
		"type Record struct {\n	AddedByNext string `json:\"addedByNext\"`\n\n",
	},
}

// buildNext builds nextImage from a changed copy of the source and loads it on the nodes.
func (w *world) buildNext(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	for _, part := range []string{"api", "cmd", "pkg", "go.mod", "go.sum", "Dockerfile", "LICENSE"} {
		if out, err := exec.CommandContext(t.Context(), "cp", "-r", filepath.Join(w.root, part), dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for file, changes := range nextRelease {
		path := filepath.Join(dir, file)
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		source := string(raw)
		for i := 0; i < len(changes); i += 2 {
			if strings.Count(source, changes[i]) != 1 {
				t.Fatalf("%s does not have %q exactly once: adapt nextRelease", file, changes[i])
			}
			source = strings.Replace(source, changes[i], changes[i+1], 1)
		}
		if err := os.WriteFile(path, []byte(source), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	archive, err := cluster.BuildImage(t.Context(), cluster.ImageBuild{
		Dockerfile: filepath.Join(dir, "Dockerfile"), Tag: nextImage, Arguments: map[string]string{"VERSION": "next"},
	}, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.LoadImage(t.Context(), archive); err != nil {
		t.Fatal(err)
	}
}

// testReleases upgrades to the later release and back. Each release must take over the claims that
// the other has prepared, Pods must run on, and this release must unprepare all claims.
func (w *world) testReleases(t *testing.T) {
	w.buildNext(t)
	u := w.tenant(t)
	u.gpus(1)
	u.template("parts", partitions(2, "1g.10gb"))
	u.template("slices", `requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]
config: [{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig,
  sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}}}]`)
	start := func(release string) (names []string, containers map[string]string) {
		t.Helper()
		u.holder("whole-"+release, 1)
		u.holder("gives-"+release, 1)
		u.pod("parts-"+release, fromTemplate("mig", "parts"), container("main", "mig"), lasting)
		u.pod("slices-"+release, fromTemplate("gpu", "slices"), container("main", "gpu"), lasting)
		names = []string{"whole-" + release, "gives-" + release, "parts-" + release, "slices-" + release}
		u.running(names...)
		return names, u.containerIDs(names...)
	}
	unchanged := func(before map[string]string) {
		t.Helper()
		for name, id := range before {
			if now := u.containerIDs(name)[name]; now != id {
				t.Errorf("the container of Pod %s was replaced", name)
			}
		}
	}
	uid := func(pod, entry string) string { t.Helper(); return string(u.claimOf(t, u.namespace, pod, entry).UID) }

	_, today := start("today")
	for pod := range today {
		entry := map[bool]string{true: "mig", false: "gpu"}[strings.HasPrefix(pod, "parts")]
		if v, added := w.writtenBy(t, uid(pod, entry)); v != 1 || added {
			t.Errorf("today's release writes version %d, added fields %v", v, added)
		}
	}
	w.installTrust(t, "--set", "image.tag=next")
	w.runsImage(t, nextImage)
	unchanged(today)
	u.remove("gives-today") // prepared by today's release, unprepared by the next
	delete(today, "gives-today")
	names, next := start("next")
	if v, added := w.writtenBy(t, uid("whole-next", "gpu")); v != 2 || !added {
		t.Errorf("the next release writes version %d, added fields %v: it does not differ from this release", v, added)
	}
	unchanged(today)

	w.installTrust(t)
	unchanged(today)
	unchanged(next)
	whole := u.holding("whole-next")
	u.killContainer("whole-next") // its CDI spec must exist for a new container
	u.restarted(whole)
	if v, added := w.writtenBy(t, uid("slices-next", "gpu")); !added {
		t.Errorf("the field that the next release added is lost, in version %d", v)
	}
	u.remove(append(names, "whole-today", "parts-today", "slices-today")...)
	w.clean(t, survivor)
}

// containerIDs returns the ID of each Pod's container, by Pod name.
func (u tenant) containerIDs(pods ...string) map[string]string {
	u.t.Helper()
	ids := map[string]string{}
	for _, name := range pods {
		ids[name] = u.get(name).Status.ContainerStatuses[0].ContainerID
	}
	return ids
}

// runsImage checks that the plugin runs this image.
func (w *world) runsImage(t *testing.T, image string) {
	t.Helper()
	if got := w.instance(t, survivor).Spec.Containers[0].Image; got != image {
		t.Fatalf("the plugin runs image %s, want %s", got, image)
	}
}

// writtenBy returns the format version of a claim's checkpoint record. added is true if the record
// has the field that only the later release writes.
func (w *world) writtenBy(t *testing.T, claimUID string) (version int, added bool) {
	t.Helper()
	for _, path := range w.records(t, survivor) {
		if !strings.HasPrefix(filepath.Base(path), claimUID) {
			continue
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var envelope struct {
			Version int `json:"version"`
			Payload struct {
				AddedByNext *string `json:"addedByNext"`
			} `json:"payload"`
		}
		if err := json.Unmarshal(raw, &envelope); err != nil {
			t.Fatal(err)
		}
		return envelope.Version, envelope.Payload.AddedByNext != nil
	}
	t.Fatalf("claim %s has no record", claimUID)
	return 0, false
}

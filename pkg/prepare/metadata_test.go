// What a claim's metadata files say is what the claim has, from its preparation to its end.

package prepare_test

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

type attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

func described(w *world, uid types.UID, request string) (names []string, all []attributes) {
	for _, r := range w.specs.metadata[uid] {
		if r.Name != request {
			continue
		}
		for _, d := range r.Devices {
			names, all = append(names, d.Name), append(all, d.Attributes)
		}
	}
	return names, all
}

func TestMetadataDescribesDevicesOfEachRequest(t *testing.T) {
	w := newWorld(t)
	w.metadata = true
	p := w.plugin(t)
	got := mustPrepare(t, p, newClaim("c", admin("a/large", gpu0), admin("a/large", gpu1), admin("b", gpu0)))
	for i, want := range []string{"k8s.gpu.nvidia.com/claim=uid-c-metadata-a", "", "k8s.gpu.nvidia.com/claim=uid-c-metadata-b"} {
		ids := got[i].CDIDeviceIDs[2:]
		if want == "" && len(ids) != 0 || want != "" && !slices.Equal(ids, []string{want}) {
			t.Errorf("device %d also has CDI devices %q, want %q", i, ids, want)
		}
	}
	spec := w.specs.of("uid-c")
	for _, path := range []string{
		"/metadata/uid-c_a.json", "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/c/a/gpu.nvidia.com-metadata.json",
		"/metadata/uid-c_b.json", "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/c/b/gpu.nvidia.com-metadata.json",
	} {
		if strings.Count(spec, path) != 1 {
			t.Errorf("the spec has not one mount of %s: %s", path, spec)
		}
	}
	names, each := described(w, "uid-c", "a/large")
	if !slices.Equal(names, []string{gpu0, gpu1}) {
		t.Fatalf("request a has %q", names)
	}
	for i, uuid := range []string{"GPU-0", "GPU-1"} {
		a := each[i]
		if *a["uuid"].StringValue != uuid || *a["type"].StringValue != "gpu" ||
			*a[device.AttrPCIBusID].StringValue != []string{"0000:1b:00.0", "0000:1c:00.0"}[i] {
			t.Errorf("device %d: %v", i, a)
		}
	}
	if names, _ := described(w, "uid-c", "b"); !slices.Equal(names, []string{gpu0}) {
		t.Errorf("request b has %q", names)
	}
	mustUnprepare(t, p, "uid-c")
	if len(w.specs.metadata) != 0 {
		t.Errorf("left: %v", w.specs.metadata)
	}
}

func TestMetadataHasWhatOnlyPreparationDecides(t *testing.T) {
	w := newWorldWithShares(t)
	w.metadata = true
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("mig", allocated("r", gpu1+"-mig-9-4")))
	mustPrepare(t, p, newClaim("part", fraction("r", share0, "10Gi", "30"), fraction("s", share0, "1Gi", "0")))
	r, _, err := p.Records.Load("uid-mig")
	if err != nil || r.Devices[0].MIGUUID == "" {
		t.Fatal(r, err)
	}
	_, mig := described(w, "uid-mig", "r")
	if a := mig[0]; *a["uuid"].StringValue != r.Devices[0].MIGUUID || *a["type"].StringValue != "mig" ||
		*a["parentUUID"].StringValue != "GPU-1" {
		t.Errorf("the partition: %v", a)
	}
	_, limited := described(w, "uid-part", "r")
	if a := limited[0]; *a["memoryLimitBytes"].IntValue != 10<<30 || *a["coresLimitPercent"].IntValue != 30 ||
		*a["type"].StringValue != "gpu-share" || *a["sharing"].StringValue != "MPS" {
		t.Errorf("the fraction: %v", a)
	}
	_, half := described(w, "uid-part", "s")
	if _, limits := half[0]["coresLimitPercent"]; limits || *half[0]["memoryLimitBytes"].IntValue != 1<<30 {
		t.Errorf("the fraction without a limit on cores: %v", half[0])
	}
	mustUnprepare(t, p, "uid-mig")
	mustPrepare(t, p, newClaim("plain", plain("r", share1)))
	_, plain := described(w, "uid-plain", "r")
	if a := plain[0]; *a["shares"].IntValue != 1 || *a["sharing"].StringValue != "TimeSlicing" || *a["memoryLimit"].StringValue != "none" {
		t.Errorf("the plain share: %v", a)
	}
}

func TestMetadataOfRecreatedPartitionHasItsNewUUID(t *testing.T) {
	w := newWorld(t)
	w.metadata = true
	h := withMIG(w)
	p := w.plugin(t)
	mustPrepare(t, p, newClaim("c", allocated("r", large4)))
	_, before := described(w, "uid-c", "r")
	clear(h.of(t, gpu0).Instances)
	w.scan()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, _, err := p.Records.Load("uid-c")
	if err != nil {
		t.Fatal(err)
	}
	_, after := described(w, "uid-c", "r")
	was, is := *before[0]["uuid"].StringValue, *after[0]["uuid"].StringValue
	if was == is || is != r.Devices[0].MIGUUID {
		t.Errorf("the metadata said %s and now says %s, the record %s", was, is, r.Devices[0].MIGUUID)
	}
}

// The kubelet keeps the answer of the first Prepare for the containers of a running Pod. So the CDI
// device with the metadata must stay, whatever the setting is now.
func TestMetadataStaysWithItsClaimWhenSwitchedOff(t *testing.T) {
	w := newWorld(t)
	w.metadata = true
	first := mustPrepare(t, w.plugin(t), newClaim("c", allocated("r", gpu0)))
	w.metadata = false
	p := w.plugin(t)
	w.specs.clear()
	if err := p.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if spec := w.specs.of("uid-c"); !strings.Contains(spec, "uid-c-metadata-r") {
		t.Errorf("the repaired spec is %s", spec)
	}
	if again := mustPrepare(t, p, newClaim("c", allocated("r", gpu0))); !slices.Equal(again[0].CDIDeviceIDs, first[0].CDIDeviceIDs) {
		t.Errorf("the answers were %q and then %q", first[0].CDIDeviceIDs, again[0].CDIDeviceIDs)
	}
	other := mustPrepare(t, p, newClaim("d", allocated("r", gpu1)))
	if len(other[0].CDIDeviceIDs) != 2 || strings.Contains(w.specs.of("uid-d"), "metadata") || len(w.specs.metadata["uid-d"]) > 0 {
		t.Errorf("a new claim has metadata: %q", other[0].CDIDeviceIDs)
	}
	mustUnprepare(t, p, "uid-c")
	if len(w.specs.metadata) != 0 {
		t.Errorf("left: %v", w.specs.metadata)
	}
}

func TestClaimGetsMetadataWhenItIsPreparedAgainAfterSwitchingOn(t *testing.T) {
	w := newWorld(t)
	c := newClaim("c", allocated("r", gpu0))
	mustPrepare(t, w.plugin(t), c)
	w.metadata = true
	c.Annotations = map[string]string{resourceapi.PodResourceClaimAnnotation: "gpu"}
	if got := mustPrepare(t, w.plugin(t), c); len(got[0].CDIDeviceIDs) != 3 {
		t.Errorf("the answer is %q", got[0].CDIDeviceIDs)
	}
	if spec := w.specs.of("uid-c"); !strings.Contains(spec, "/resourceclaimtemplates/gpu/r/gpu.nvidia.com-metadata.json") {
		t.Errorf("the spec is %s", spec)
	}
}

func TestPrepareFailsIfMetadataCannotBeWritten(t *testing.T) {
	w := newWorld(t)
	w.metadata = true
	p := w.plugin(t)
	c := newClaim("c", allocated("not a name", gpu0))
	if _, err := p.Prepare(t.Context(), c); err == nil || !strings.Contains(err.Error(), `"not a name"`) {
		t.Errorf("got %v", err)
	}
	checkClean(t, w)
}

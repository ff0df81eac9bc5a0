package metadata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	upstream "k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/install"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

var (
	claim    = Claim{UID: "uid-1", Namespace: "team", Name: "train"}
	template = Claim{UID: "uid-2", Namespace: "team", Name: "pod-gpu-x7k", PodClaimName: "gpu"}
)

func request(name, uuid string) Request {
	return Request{Name: name, Devices: []upstream.Device{{
		Driver: "gpu.nvidia.com", Pool: "node", Name: "gpu-0000-1b-00-0",
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"uuid": {StringValue: &uuid}, "resource.kubernetes.io/pciBusID": {StringValue: ptr.To("0000:1b:00.0")},
			"memoryLimitBytes": {IntValue: ptr.To(int64(10 << 30))}, "driverVersion": {VersionValue: ptr.To("580.65.6")},
		},
	}}}
}

// read reads a file as upstream's readers do, and validates it.
func read(t *testing.T, file string) upstream.DeviceMetadata {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var m upstream.DeviceMetadata
	var invalid error
	var kind schema.GroupVersionKind
	err = devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(data)), &m,
		devicemetadata.DecodeMetadataWithValidationResult(&invalid), devicemetadata.DecodeMetadataStoreGVKResult(&kind))
	if err = errors.Join(err, invalid); err != nil {
		t.Fatal(err)
	}
	if kind.Version != "v1beta1" {
		t.Errorf("the first version is %s, and the newest must be", kind.Version)
	}
	return m
}

func TestUpstreamReaderReadsFiles(t *testing.T) {
	for name, c := range map[string]Claim{"of a claim": claim, "of a claim from a template": template} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := NewFiles(root).write(c, request("gpu/large", "GPU-1")); err != nil {
				t.Fatal(err)
			}
			edits, err := NewFiles(root).MetadataEdits(c, "gpu/large")
			if err != nil {
				t.Fatal(err)
			}
			want := upstream.ResourceClaimFilePath("gpu.nvidia.com", "train", "gpu")
			if c.PodClaimName != "" {
				want = upstream.ResourceClaimTemplateFilePath("gpu.nvidia.com", "gpu", "gpu")
			}
			mount := edits.Mounts[0]
			if mount.ContainerPath != want || !slices.Contains(mount.Options, "ro") {
				t.Errorf("the mount is %+v", mount)
			}
			m := read(t, mount.HostPath)
			if m.UID != c.UID || m.Name != c.Name || m.Namespace != "team" || m.Generation != 1 || ptr.Deref(m.PodClaimName, "") != c.PodClaimName {
				t.Errorf("read %+v", m)
			}
			if len(m.Requests) != 1 || m.Requests[0].Name != "gpu/large" {
				t.Fatalf("requests %+v", m.Requests)
			}
			d := m.Requests[0].Devices[0]
			if d.Driver != "gpu.nvidia.com" || d.Pool != "node" || *d.Attributes["resource.kubernetes.io/pciBusID"].StringValue != "0000:1b:00.0" ||
				*d.Attributes["memoryLimitBytes"].IntValue != 10<<30 || *d.Attributes["driverVersion"].VersionValue != "580.65.6" {
				t.Errorf("device %+v", d)
			}
		})
	}
}

// A reader of v1alpha1 only, such as KubeVirt 1.8, skips other versions in the stream. It knows
// JSON and the names of the fields.
func TestReaderOfOneVersionReadsFiles(t *testing.T) {
	for _, version := range Versions {
		root := t.TempDir()
		if err := NewFiles(root).write(template, request("gpu", "GPU-1")); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(root, "uid-2_gpu.json"))
		if err != nil {
			t.Fatal(err)
		}
		type object struct {
			APIVersion, Kind, PodClaimName string
			Metadata                       struct{ Name, Namespace, UID string }
			Requests                       []struct {
				Name    string
				Devices []struct {
					Name       string
					Attributes map[string]struct{ String string }
				}
			}
		}
		var found []object
		for stream := json.NewDecoder(bytes.NewReader(data)); ; {
			var next object
			if err := stream.Decode(&next); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if next.APIVersion == version.String() {
				found = append(found, next)
			}
		}
		if len(found) != 1 {
			t.Fatalf("%d objects of %s in %s", len(found), version, data)
		}
		o := found[0]
		if o.Kind != "DeviceMetadata" || o.PodClaimName != "gpu" || o.Metadata.UID != "uid-2" || o.Requests[0].Name != "gpu" ||
			o.Requests[0].Devices[0].Attributes["resource.kubernetes.io/pciBusID"].String != "0000:1b:00.0" {
			t.Errorf("%s: %+v", version, o)
		}
	}
}

// A version that a newer library knows is missing here until an author adds it.
func TestAllVersionsOfTheLibraryAreWritten(t *testing.T) {
	for _, v := range install.NewScheme().PrioritizedVersionsForGroup(upstream.GroupName) {
		if v.Version != "__internal" && !slices.Contains(Versions, v) {
			t.Errorf("version %s is not written", v)
		}
	}
}

func TestGenerationGrowsWithEachChange(t *testing.T) {
	root := t.TempDir()
	f := NewFiles(root)
	name := filepath.Join(root, "uid-1_gpu.json")
	write := func(uuid string) os.FileInfo {
		t.Helper()
		if err := f.write(claim, request("gpu", uuid)); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	first := write("GPU-1")
	if first.Mode().Perm() != 0o644 {
		t.Errorf("containers of other users cannot read it: %v", first.Mode())
	}
	if again := write("GPU-1"); !os.SameFile(first, again) {
		t.Error("an unchanged file was written again")
	}
	write("GPU-2")
	if m := read(t, name); m.Generation != 2 || *m.Requests[0].Devices[0].Attributes["uuid"].StringValue != "GPU-2" {
		t.Errorf("read %+v", m)
	}
	if err := os.WriteFile(name, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	write("GPU-2")
	if m := read(t, name); m.Generation != 1 {
		t.Errorf("an unreadable file was replaced by generation %d", m.Generation)
	}
}

func TestNamesakesHaveFilesOfTheirOwn(t *testing.T) {
	root := t.TempDir()
	f := NewFiles(root)
	namesake := claim
	namesake.UID = "uid-new"
	for _, c := range []Claim{claim, namesake} {
		if err := f.write(c, request("gpu", "GPU-1")); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Remove(claim.UID); err != nil { // a late Unprepare of the old claim
		t.Fatal(err)
	}
	if left, err := f.Claims(); err != nil || !slices.Equal(left, []types.UID{"uid-new"}) {
		t.Errorf("left: %v, %v", left, err)
	}
	read(t, filepath.Join(root, "uid-new_gpu.json"))
	if err := errors.Join(f.Remove("uid-new"), f.Remove("uid-new"), f.Remove("never seen")); err != nil {
		t.Error(err)
	}
}

// A claim's files are found by the UID in their names. So no UID may name the files of others.
func TestRemovesOnlyTheFilesOfTheClaim(t *testing.T) {
	root := t.TempDir()
	f := NewFiles(root)
	longer := claim
	longer.UID = claim.UID + "_gpu" // a name that the API server never gives
	if err := errors.Join(f.write(claim, request("gpu", "GPU-1")), f.write(claim, request("second", "GPU-2")),
		f.write(longer, request("gpu", "GPU-1")),
		os.WriteFile(filepath.Join(root, "uid-1_gpu.tmp"), nil, 0o600), // of a killed call
		os.WriteFile(filepath.Join(root, "other"), nil, 0o600),
		f.Remove(""), f.Remove("uid"), f.Remove("../uid-1"), f.Remove(claim.UID)); err != nil {
		t.Fatal(err)
	}
	if left, err := f.Claims(); err != nil || !slices.Equal(left, []types.UID{longer.UID}) {
		t.Errorf("left: %v, %v", left, err)
	}
	if names, err := os.ReadDir(root); err != nil || len(names) != 2 {
		t.Errorf("left: %v, %v", names, err)
	}
}

func TestNamesThatLeadElsewhereAreRefused(t *testing.T) {
	root := filepath.Join(t.TempDir(), "metadata")
	f := NewFiles(root)
	for _, uid := range []types.UID{"", "../x", "a/b", "a\x00"} {
		bad := claim
		bad.UID = uid
		if f.write(bad, request("gpu", "GPU-1")) == nil {
			t.Errorf("UID %q is accepted", uid)
		}
		if _, err := NewFiles(root).MetadataEdits(bad, "gpu"); err == nil {
			t.Errorf("UID %q is mounted", uid)
		}
	}
	for _, name := range []string{"", "..", "../x", "A", "a b", "/x"} {
		if f.write(claim, request(name, "GPU-1")) == nil {
			t.Errorf("request %q is accepted", name)
		}
		if _, err := NewFiles(root).MetadataEdits(claim, name); err == nil {
			t.Errorf("request %q is mounted", name)
		}
	}
	for _, name := range []string{"", "..", "../../etc", "a/b"} {
		if got := PodClaimName(map[string]string{resourceapi.PodResourceClaimAnnotation: name}); got != "" {
			t.Errorf("annotation %q names %q", name, got)
		}
	}
	if _, err := os.Stat(root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something was written: %v", err)
	}
}

func TestUnwritableDirectoryIsAnError(t *testing.T) {
	root := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(root, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f := NewFiles(root)
	if err := f.write(claim, request("gpu", "GPU-1")); err == nil || !strings.Contains(err.Error(), root) {
		t.Errorf("got %v", err)
	}
	if _, err := f.Claims(); err == nil {
		t.Error("the claims of a file were listed")
	}
}

// The files of a killed call are found and removed with the CDI specs.
func TestSpecsAndFilesAreListedAndRemovedTogether(t *testing.T) {
	s := WithSpecs{cdi.NewStore(t.TempDir()), NewFiles(t.TempDir())}
	edits, err := NewFiles("/metadata").MetadataEdits(claim, "gpu")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		s.write(claim, request("gpu", "GPU-1")), s.write(template, request("gpu", "GPU-1")),
		s.WriteClaim(claim.UID, []specs.Device{{Name: "uid-1-x", ContainerEdits: edits}}),
		s.WriteClaim("uid-3", []specs.Device{{Name: "uid-3-x", ContainerEdits: edits}}),
	); err != nil {
		t.Fatal(err)
	}
	if all, err := s.Claims(); err != nil || !slices.Equal(all, []types.UID{"uid-1", "uid-2", "uid-3"}) {
		t.Errorf("%v, %v", all, err)
	}
	for _, uid := range []types.UID{"uid-1", "uid-2", "uid-3"} {
		if err := s.RemoveClaim(uid); err != nil {
			t.Error(err)
		}
	}
	if all, err := s.Claims(); err != nil || len(all) > 0 {
		t.Errorf("left: %v, %v", all, err)
	}
}

func TestRemoveAllLeavesNoDirectory(t *testing.T) {
	root := filepath.Join(t.TempDir(), "metadata")
	f := NewFiles(root)
	if err := errors.Join(f.RemoveAll(), f.write(claim, request("gpu", "GPU-1")), f.RemoveAll()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is left (%v)", err)
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, held := range []int{0, 500} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			f := NewFiles(b.TempDir())
			for i := range held {
				c := claim
				c.UID = types.UID(fmt.Sprint("held-", i))
				if err := f.write(c, request("gpu", "GPU-1")); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				if err := errors.Join(f.write(claim, request("gpu", "GPU-1")), f.Remove(claim.UID)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestPipeInPlaceOfAFileIsReplaced(t *testing.T) {
	f := NewFiles(t.TempDir())
	_, path, err := f.path(claim.UID, "gpu")
	if err != nil {
		t.Fatal(err)
	}
	durabletest.Pipe(t, path)
	durabletest.Returns(t, func() { err = f.write(claim, request("gpu", "GPU-1")) })
	if err != nil {
		t.Fatal(err)
	}
	if m := read(t, path); m.Generation != 1 {
		t.Errorf("generation %d", m.Generation)
	}
}

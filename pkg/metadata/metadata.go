package metadata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	serializerjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/install"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// Versions are the API versions in each file, the newest first. KubeVirt 1.8 reads only v1alpha1.
var Versions = []schema.GroupVersion{v1beta1.SchemeGroupVersion, v1alpha1.SchemeGroupVersion}

// encoders write one API version each, in the order of Versions. Child processes need none.
var encoders = sync.OnceValue(func() (all []runtime.Encoder) {
	scheme := install.NewScheme()
	codecs := serializer.NewCodecFactory(scheme)
	text := serializerjson.NewSerializerWithOptions(serializerjson.DefaultMetaFactory, scheme, scheme, serializerjson.SerializerOptions{})
	for _, v := range Versions {
		all = append(all, codecs.EncoderForVersion(text, v))
	}
	return all
})

// Claim identifies the claim that a file describes.
type Claim struct {
	UID             types.UID
	Namespace, Name string
	// PodClaimName is the claim's name in the Pod's spec.resourceClaims. It is empty for a claim that
	// no template made, which containers know by its own name.
	PodClaimName string
}

// Request has the devices that one request of a claim got. Its name includes the subrequest, as in
// the claim's allocation: "gpu/large".
type Request = metadata.DeviceMetadataRequest

// PodClaimName returns the name under which the claim with these annotations is in a Pod's spec, or
// "" if no template made it. It ignores a value that could lead to another path.
func PodClaimName(annotations map[string]string) string {
	name := annotations[resourceapi.PodResourceClaimAnnotation]
	if len(validation.IsDNS1123Label(name)) > 0 {
		return ""
	}
	return name
}

// Files are the metadata files of all claims. The caller holds the claim's lock.
type Files struct{ root string }

// NewFiles keeps the files in root, a directory at the same path on the host. It is created with
// the first file.
func NewFiles(root string) *Files { return &Files{root} }

// MetadataEdits returns the CDI edits that show a container the file of a request. The path in the
// container is defined in k8s.io/dynamic-resource-allocation/api/metadata.
func (f *Files) MetadataEdits(c Claim, request string) (specs.ContainerEdits, error) {
	base, host, err := f.path(c.UID, request)
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	target := metadata.ResourceClaimFilePath(device.DriverName, c.Name, base)
	if c.PodClaimName != "" {
		target = metadata.ResourceClaimTemplateFilePath(device.DriverName, c.PodClaimName, base)
	}
	return specs.ContainerEdits{Mounts: []*specs.Mount{{
		HostPath: host, ContainerPath: target, Options: []string{"ro", "bind", "nosuid", "nodev", "noexec"},
	}}}, nil
}

// path returns where the file of a claim's request is: <UID>_<request>.json, without the
// subrequest. It also returns the request's name in it, which has no "_". It refuses names that
// would lead out of root, although the API server makes no such UID.
func (f *Files) path(uid types.UID, request string) (base, path string, err error) {
	base = resourceclaim.BaseRequestRef(request)
	if wrong := validation.IsDNS1123Label(base); len(wrong) > 0 {
		return "", "", fmt.Errorf("request %q cannot name a metadata file: %s", base, strings.Join(wrong, ", "))
	}
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") {
		return "", "", fmt.Errorf("claim UID %q cannot name a metadata file", uid)
	}
	return base, filepath.Join(f.root, string(uid)+"_"+base+".json"), nil
}

// WriteMetadata writes the files of the claim's requests. It leaves a file that has this content
// already. Otherwise it raises the generation in the file. A container sees the new file when it
// starts again.
//
// The files are not synced to disk, because after a crash of the node the kubelet prepares each
// claim again, and WriteMetadata compares the content.
func (f *Files) WriteMetadata(c Claim, requests []Request) error {
	for _, r := range requests {
		if err := f.write(c, r); err != nil {
			return err
		}
	}
	return nil
}

func (f *Files) write(c Claim, r Request) error {
	_, path, err := f.path(c.UID, r.Name)
	if err != nil {
		return err
	}
	there, err := durable.OS{}.ReadFile(path)
	// What is not this driver's file, such as a pipe, is replaced.
	if untrusted := new(durable.UntrustedError); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.As(err, &untrusted) {
		return fmt.Errorf("read device metadata: %w", err)
	}
	var old metadata.DeviceMetadata // its generation is 0 if there is no file, or a damaged one
	_ = devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(there)), &old)
	data, err := encode(c, r, max(old.Generation, 1))
	if err != nil || bytes.Equal(data, there) {
		return err
	}
	if old.Generation > 0 {
		if data, err = encode(c, r, old.Generation+1); err != nil {
			return err
		}
	}
	temporary := strings.TrimSuffix(path, ".json") + ".tmp"
	err = durable.ReplaceUnsynced(path, temporary, data)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(f.root, 0o700); err == nil {
			err = durable.ReplaceUnsynced(path, temporary, data)
		}
	}
	if err != nil {
		return fmt.Errorf("write device metadata: %w", err)
	}
	return nil
}

// encode returns the content of the request's file: the same data in each of the versions.
func encode(c Claim, r Request, generation int64) ([]byte, error) {
	data := &metadata.DeviceMetadata{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name, UID: c.UID, Generation: generation},
		Requests:   []Request{r},
	}
	if c.PodClaimName != "" {
		data.PodClaimName = &c.PodClaimName
	}
	var stream bytes.Buffer
	for i, encoder := range encoders() {
		if err := encoder.Encode(data, &stream); err != nil {
			return nil, fmt.Errorf("describe claim %s/%s in version %s: %w", c.Namespace, c.Name, Versions[i], err)
		}
	}
	return stream.Bytes(), nil
}

// Remove removes the claim's files. If there are none, it succeeds.
func (f *Files) Remove(uid types.UID) error {
	entries, err := f.list()
	for _, e := range entries {
		if claimOf(e) != uid || uid == "" {
			continue
		}
		if err := os.Remove(filepath.Join(f.root, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove device metadata: %w", err)
		}
	}
	return err
}

// RemoveAll removes the files of all claims, and their directory.
func (f *Files) RemoveAll() error {
	if err := os.RemoveAll(f.root); err != nil {
		return fmt.Errorf("remove all device metadata: %w", err)
	}
	return nil
}

// Claims lists the UIDs of the claims that have files.
func (f *Files) Claims() (uids []types.UID, _ error) {
	entries, err := f.list()
	for _, e := range entries {
		if uid := claimOf(e); uid != "" {
			uids = append(uids, uid)
		}
	}
	return slices.Compact(uids), err
}

// list lists the files of all claims, with the temporary ones that killed calls left, sorted by
// their names.
func (f *Files) list() ([]fs.DirEntry, error) {
	entries, err := os.ReadDir(f.root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list device metadata: %w", err)
	}
	return entries, nil
}

// claimOf returns the UID in the name of a file, or "".
func claimOf(e fs.DirEntry) types.UID {
	return types.UID(e.Name()[:max(strings.LastIndexByte(e.Name(), '_'), 0)])
}

// WithSpecs are the CDI specs and the metadata files of all claims. A claim's files exist as long
// as its spec, so what removes a spec or finds one that a killed call left does the same for the
// files.
type WithSpecs struct {
	*cdi.Store
	*Files
}

// RemoveClaim removes the claim's spec, and then the files that it names.
func (s WithSpecs) RemoveClaim(uid types.UID) error {
	if err := s.Store.RemoveClaim(uid); err != nil {
		return err
	}
	return s.Remove(uid)
}

// Claims lists the claims that have a spec or files.
func (s WithSpecs) Claims() ([]types.UID, error) {
	specified, err := s.Store.Claims()
	if err != nil {
		return nil, err
	}
	described, err := s.Files.Claims()
	if err != nil {
		return nil, err
	}
	return sets.List(sets.New(slices.Concat(specified, described)...)), nil
}

// C functions over libtorch's c10d, for c10d.rs: a TCPStore, and a ProcessGroupGloo of tensors on the CPU. A function returns 0, or 1 after it has
// written the reason to `error`.

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

using std::chrono::milliseconds;

struct Store {
  c10::intrusive_ptr<c10d::TCPStore> server_or_client;
  c10::intrusive_ptr<c10d::Store> keys;
};

struct Group {
  c10::intrusive_ptr<c10d::Backend> backend;
};

struct Error {
  char* text;
  size_t capacity;

  int because(const char* reason) const {
    std::strncpy(text, reason, capacity - 1);
    text[capacity - 1] = 0;
    return 1;
  }
};

// An exception must not leave a C function. Naming c10::Error here would link the launchers to libtorch.
template <class Body>
int guarded(Error error, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& thrown) {
    return error.because(thrown.what());
  } catch (...) {
    return error.because("an unknown C++ exception");
  }
}

// Shares the tensor's memory, outside of autograd.
std::vector<at::Tensor> list_of(const at::Tensor* tensor) {
  return {tensor->detach()};
}

// libtorch's flight recorder writes the group of an operation into a map that it does not lock. A program has one group; the tests have several.
std::mutex queueing;

template <class Queue>
void queue_and_wait(Queue queue) {
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard<std::mutex> locked(queueing);
    work = queue();
  }
  work->wait();
}

}  // namespace

extern "C" {

// With a `listener`, a socket that is bound to `port` and becomes the server's, this process is the server; without one it is -1.
int medusa_store_open(const char* host, uint16_t port, int listener, const char* prefix, int64_t timeout_ms, Store** out, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] {
    c10::initLogging();  // reads TORCH_CPP_LOG_LEVEL, which src/cli/launcher.rs sets
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = listener >= 0;
    if (options.isServer) {
      options.masterListenFd = listener;
    }
    options.waitWorkers = false;
    options.timeout = milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(std::string(host), options);
    *out = new Store{store, c10::make_intrusive<c10d::PrefixStore>(prefix, store)};
  });
}

uint16_t medusa_store_port(const Store* store) {
  return store->server_or_client->getPort();
}

int medusa_store_set(Store* store, const char* key, const uint8_t* bytes, size_t length, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] { store->keys->set(key, std::vector<uint8_t>(bytes, bytes + length)); });
}

// Adds to a counter, which starts at 0.
int medusa_store_add(Store* store, const char* key, int64_t amount, int64_t* sum, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] { *sum = store->keys->add(key, amount); });
}

// Waits until the key is set; at most `room` bytes of its value are copied.
int medusa_store_get(Store* store, const char* key, int64_t timeout_ms, uint8_t* bytes, size_t room, size_t* length, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] {
    store->keys->wait({key}, milliseconds(timeout_ms));
    const std::vector<uint8_t> value = store->keys->get(key);
    *length = std::min(room, value.size());
    std::copy_n(value.begin(), *length, bytes);
  });
}

void medusa_store_close(Store* store) {
  delete store;
}

// `address`: that of the network card to use, or null for the one that the machine's name resolves to. GLOO_SOCKET_IFNAME overrides both: names of
// interfaces with commas between them, which operations take in turn, as in PyTorch.
int medusa_group_open(Store* store, int rank, int world_size, const char* address, int64_t timeout_ms, Group** out, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] {
    auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(timeout_ms));
    const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
    std::istringstream names(interfaces ? interfaces : "");
    for (std::string name; std::getline(names, name, ',');) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
    }
    if (options->devices.empty()) {
      options->devices.push_back(address ? c10d::ProcessGroupGloo::createDeviceForHostname(address) : c10d::ProcessGroupGloo::createDefaultDevice());
    }
    *out = new Group{c10::make_intrusive<c10d::ProcessGroupGloo>(store->keys, rank, world_size, options)};
  });
}

int medusa_group_all_reduce(Group* group, const at::Tensor* sum, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] {
    auto tensors = list_of(sum);
    queue_and_wait([&] { return group->backend->allreduce(tensors); });
  });
}

int medusa_group_all_gather(Group* group, const at::Tensor* all, const at::Tensor* own, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] {
    at::Tensor output = all->detach();
    at::Tensor input = own->detach();
    queue_and_wait([&] { return group->backend->_allgather_base(output, input); });
  });
}

int medusa_group_broadcast(Group* group, const at::Tensor* tensor, int root, char* text, size_t capacity) {
  return guarded({text, capacity}, [&] {
    auto tensors = list_of(tensor);
    c10d::BroadcastOptions options;
    options.rootRank = root;
    queue_and_wait([&] { return group->backend->broadcast(tensors, options); });
  });
}

void medusa_group_close(Group* group) {
  delete group;
}

}  // extern "C"

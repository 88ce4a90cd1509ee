// As much of XLA's runtime as calls FFI handlers on CUDA: one call site, run stage by
// stage on the devices of a group, with the stand-in libraries below it.
#ifndef JAX_EP_TESTS_CUDA_FAKE_XLA_H_
#define JAX_EP_TESTS_CUDA_FAKE_XLA_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/cuda/driver.h"
#include "ffi/cuda/nccl.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/collectives_c_api.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

// What a handler that answers later completes; here it has, when it returns.
struct XLA_FFI_Future {
  bool is_done = false;
  std::string error;
};

// One device during one stage of one execution.
struct XLA_FFI_InvokeContext {
  jax_ep::cuda::CUstream stream = nullptr;
  int32_t ordinal = 0;
  int64_t run_id = -1;
  const XLA_FFI_Extension* extension = nullptr;
  void** state = nullptr;
};

namespace fake_xla {

inline XLA_FFI_Error* Ok() { return nullptr; }

inline const XLA_FFI_Api* Api() {
  static XLA_FFI_Api api = [] {
    XLA_FFI_Api a{};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
    a.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->errc, args->message};
    };
    a.XLA_FFI_Error_GetDetails = [](XLA_FFI_Error_GetDetails_Args* args) {
      args->message = args->error->message.c_str();
      args->errc = args->error->code;
    };
    a.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) {
      delete args->error;
    };
    a.XLA_FFI_Type_Register = [](XLA_FFI_Type_Register_Args* args) {
      args->type_id->type_id = 7;
      return Ok();
    };
    a.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) {
      *args->ctx->state = args->state;
      return Ok();
    };
    a.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) {
      args->state = *args->ctx->state;
      return Ok();
    };
    a.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) {
      args->stream = args->ctx->stream;
      return Ok();
    };
    a.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) {
      args->device_ordinal = args->ctx->ordinal;
      return Ok();
    };
    a.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) {
      args->run_id = args->ctx->run_id;
      return Ok();
    };
    // A pool of one thread, the caller's.
    a.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
      args->task(args->data);
      return Ok();
    };
    a.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) {
      *args->num_threads = 1;
      return Ok();
    };
    a.XLA_FFI_Future_Create = [](XLA_FFI_Future_Create_Args* args) {
      args->future = new XLA_FFI_Future;
      return Ok();
    };
    a.XLA_FFI_Future_SetAvailable = [](XLA_FFI_Future_SetAvailable_Args* args) {
      args->future->is_done = true;
      return Ok();
    };
    a.XLA_FFI_Future_SetError = [](XLA_FFI_Future_SetError_Args* args) {
      args->future->is_done = true;
      args->future->error = args->error->message;
      delete args->error;
      return Ok();
    };
    a.XLA_FFI_InvokeContext_FindExtension =
        [](XLA_FFI_InvokeContext_FindExtension_Args* args) {
          const XLA_FFI_Extension* found = args->ctx->extension;
          args->extension = found && found->id.extension_type == args->extension_type
                                ? found
                                : nullptr;
          return Ok();
        };
    return a;
  }();
  return &api;
}

// The collectives extension of one device.
struct Collectives {
  explicit Collectives(jax_ep::cuda::ncclComm_t comm, int major = 0, int minor = 1)
      : comm(comm) {
    c.extension_base.struct_size = sizeof(c);
    c.extension_base.id = {XLA_FFI_Extension_Collectives, major, minor};
    c.state = reinterpret_cast<XLA_FFI_CollectivesState*>(this);
    c.request_communicator = [](const XLA_FFI_Collectives_Extension* self,
                                XLA_FFI_Communicator_Request_Args* args) {
      From(self)->requested = Groups(args->groups, args->num_groups);
      return args->group_mode == XLA_FFI_GROUP_FLATTENED_ID
                 ? nullptr
                 : new XLA_FFI_Error{XLA_FFI_Error_Code_INVALID_ARGUMENT, "group mode"};
    };
    c.get_communicator = [](const XLA_FFI_Collectives_Extension* self,
                            XLA_FFI_Communicator_Get_Args* args) {
      Collectives* collectives = From(self);
      if (collectives->requested != Groups(args->groups, args->num_groups)) {
        return new XLA_FFI_Error{XLA_FFI_Error_Code_NOT_FOUND, "not requested"};
      }
      args->communicator = reinterpret_cast<XLA_FFI_Communicator*>(collectives->comm);
      return Ok();
    };
  }

  using GroupList = std::vector<std::vector<int64_t>>;

  static GroupList Groups(const XLA_FFI_ReplicaGroup* groups, size_t num_groups) {
    GroupList list;
    for (size_t g = 0; g < num_groups; ++g) {
      list.emplace_back(groups[g].ids, groups[g].ids + groups[g].size);
    }
    return list;
  }

  static Collectives* From(const XLA_FFI_Collectives_Extension* self) {
    return reinterpret_cast<Collectives*>(self->state);
  }

  XLA_FFI_Collectives_Extension c{};
  jax_ep::cuda::ncclComm_t comm;
  GroupList requested;
};

class Attrs {
 public:
  Attrs& Int(const char* name, int64_t value) {
    ints_.push_back(value);
    return Scalar(name, XLA_FFI_DataType_S64, &ints_.back());
  }
  Attrs& Float(const char* name, double value) {
    floats_.push_back(value);
    return Scalar(name, XLA_FFI_DataType_F64, &floats_.back());
  }
  Attrs& Bool(const char* name, bool value) {
    bools_.push_back(value);
    return Scalar(name, XLA_FFI_DataType_PRED, &bools_.back());
  }
  Attrs& String(const char* name, std::string value) {
    strings_.push_back(std::move(value));
    spans_.push_back({strings_.back().data(), strings_.back().size()});
    return Add(name, XLA_FFI_AttrType_STRING, &spans_.back());
  }
  Attrs& Ints(const char* name, std::vector<int64_t> value) {
    int_arrays_.push_back(std::move(value));
    return Array(name, XLA_FFI_DataType_S64, int_arrays_.back().size(),
                 int_arrays_.back().data());
  }
  Attrs& Ints32(const char* name, std::vector<int32_t> value) {
    int32_arrays_.push_back(std::move(value));
    return Array(name, XLA_FFI_DataType_S32, int32_arrays_.back().size(),
                 int32_arrays_.back().data());
  }

  Attrs& Remove(const std::string& name) {
    for (size_t at = 0; at < names_.size(); ++at) {
      if (std::string(names_[at]->ptr, names_[at]->len) != name) continue;
      types_.erase(types_.begin() + at);
      names_.erase(names_.begin() + at);
      values_.erase(values_.begin() + at);
      break;
    }
    return *this;
  }

  XLA_FFI_Attrs Get() {
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(types_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  Attrs& Scalar(const char* name, XLA_FFI_DataType dtype, void* value) {
    scalars_.push_back({dtype, value});
    return Add(name, XLA_FFI_AttrType_SCALAR, &scalars_.back());
  }
  Attrs& Array(const char* name, XLA_FFI_DataType dtype, size_t size, void* data) {
    arrays_.push_back({dtype, size, data});
    return Add(name, XLA_FFI_AttrType_ARRAY, &arrays_.back());
  }
  // XLA sorts attributes by name, and handlers rely on it. Later values win.
  Attrs& Add(const char* name, XLA_FFI_AttrType type, void* value) {
    const std::string text = name;
    size_t at = 0;
    while (at < names_.size() && std::string(names_[at]->ptr, names_[at]->len) < text) {
      ++at;
    }
    if (at < names_.size() && std::string(names_[at]->ptr, names_[at]->len) == text) {
      types_[at] = type;
      values_[at] = value;
      return *this;
    }
    texts_.push_back(text);
    spans_.push_back({texts_.back().data(), texts_.back().size()});
    types_.insert(types_.begin() + at, type);
    names_.insert(names_.begin() + at, &spans_.back());
    values_.insert(values_.begin() + at, value);
    return *this;
  }

  std::deque<int64_t> ints_;
  std::deque<double> floats_;
  std::deque<bool> bools_;
  std::deque<std::string> strings_, texts_;
  std::deque<std::vector<int64_t>> int_arrays_;
  std::deque<std::vector<int32_t>> int32_arrays_;
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
};

// Operands or results, each over memory of its own.
class Buffers {
 public:
  Buffers& Add(XLA_FFI_DataType dtype, std::vector<int64_t> dims, size_t shift = 0) {
    // Enough for every dtype; what is larger is not touched by a good handler.
    double bytes = 16;
    for (int64_t dim : dims) bytes *= static_cast<double>(dim);
    memory_.push_back(std::make_unique<char[]>(
        static_cast<size_t>(std::min<double>(bytes, kMaxBytes)) + 256));
    auto address = reinterpret_cast<uintptr_t>(memory_.back().get());
    dims_.push_back(std::move(dims));
    buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype,
                        reinterpret_cast<void*>((address + 127) / 128 * 128 + shift),
                        static_cast<int64_t>(dims_.back().size()),
                        dims_.back().data()});
    return *this;
  }

  size_t size() const { return buffers_.size(); }
  XLA_FFI_Buffer& operator[](size_t i) { return buffers_[i]; }
  const std::vector<int64_t>& Dims(size_t i) const { return dims_[i]; }

  XLA_FFI_Args Args() {
    Fill();
    return {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(buffers_.size()),
            arg_types_.data(), pointers_.data()};
  }
  XLA_FFI_Rets Rets() {
    Fill();
    return {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(buffers_.size()),
            ret_types_.data(), pointers_.data()};
  }

 private:
  static constexpr double kMaxBytes = 1 << 20;

  void Fill() {
    pointers_.clear();
    for (auto& buffer : buffers_) pointers_.push_back(&buffer);
    arg_types_.assign(buffers_.size(), XLA_FFI_ArgType_BUFFER);
    ret_types_.assign(buffers_.size(), XLA_FFI_RetType_BUFFER);
  }

  std::deque<std::unique_ptr<char[]>> memory_;
  std::deque<std::vector<int64_t>> dims_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::vector<void*> pointers_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

// Calls a handler; returns "" or the error's message.
inline std::string Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                        XLA_FFI_InvokeContext* context, Attrs& attrs,
                        Buffers* operands = nullptr, Buffers* results = nullptr) {
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = context;
  frame.stage = stage;
  frame.attrs = attrs.Get();
  frame.args = operands ? operands->Args() : Buffers().Args();
  frame.rets = results ? results->Rets() : Buffers().Rets();
  XLA_FFI_Error* error = handler(&frame);
  if (frame.future != nullptr) {
    std::unique_ptr<XLA_FFI_Future> future(frame.future);
    return future->is_done ? future->error : "the handler waits";
  }
  if (error == nullptr) return "";
  std::string message = error->message;
  delete error;
  return message;
}

}  // namespace fake_xla

#endif  // JAX_EP_TESTS_CUDA_FAKE_XLA_H_
